"""One run: a configuration and a seed, from an empty folder to DONE."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.checks.earlier_run import run_to_begin_with, run_to_replay
from harness.checks.job import JobPlan, settled_evaluation
from harness.checks.plugins import engine_reads_files
from harness.comparison.measures import summary_of
from harness.comparison.runs import run_of
from harness.config import ConfigError, JobConfig, ModelConfig
from harness.config.compose import cell_name, make_schedule, plain, plugins_of
from harness.config.inputs import inputs_of
from harness.cost_model.shape import parameters
from harness.driver.backends import RunSpec, clock_of, event_loop
from harness.driver.checkpoint_files import CHECKPOINTS
from harness.driver.checkpointing import Left
from harness.driver.earlier import EarlierAttempt, NothingToGoBackTo
from harness.driver.evaluation import Evaluated
from harness.driver.listeners import IterationListener, RunListener
from harness.driver.loggers import LoggedRun, Loggers
from harness.driver.model_folders import initial_model, model_card, write_beside
from harness.driver.progress import ProgressDisplay, waiting_for
from harness.driver.restarts import GivenUp, Restarts, how, roles_in
from harness.driver.session import Session
from harness.metrics.done import CRITIC, MODEL
from harness.metrics.manifest import RunIdentity, build_manifest
from harness.metrics.run_files import RunDirectory, last_evaluated, load_config, load_manifest, run_directory
from harness.metrics.samples import Texts
from harness.metrics.schemas import Restart
from harness.metrics.system import LoadWatch
from harness.protocols import EngineDied
from harness.rl.learning_rate import peak_rate, policy_settings
from harness.runtime.fork_server import ForkServer
from harness.runtime.interrupts import LeaveRequest, run_in
from harness.runtime.runtime import Handle, WorkerDied, ask_all, cluster_address, parts_of
from harness.tasks import Task, make_task, tokenizer_of
from harness.weight_sync.membership import LostEngine
from harness.workers.replaying import Replay
from harness.workers.training import RememberingRole

MEMBERSHIP = "membership.json"


@dataclasses.dataclass(frozen=True)
class WorkerLoss:
    """Roles without which an attempt could not go on. noticed: a reading of time.monotonic."""

    why: str
    roles: list[str]
    noticed: float


LOGS = "logs"


def run_seed(
    config: JobConfig,
    plan: JobPlan,
    seed: int,
    results: Path,
    console: Console,
    leave: LeaveRequest,
    server: ForkServer | None = None,
) -> Path:
    """Run one seed and return its folder. Whatever ends it early leaves no DONE, no lock and no process. Raises
    Left, alone or in a group, where `leave` asks for it and checkpoints are made. server: forks its workers, and
    stays for other runs.

    Where roles die that cannot be started again by themselves, all go back to the last checkpoint together. Raises
    WorkerDied where there is none, where they did so too often, or where what is left has no room for them."""
    restarts, loss = Restarts(config.restarts.limit), None
    while True:
        try:
            return _attempt(config, plan, seed, results, console, leave, server, restarts, loss)
        except NothingToGoBackTo:
            assert loss is not None, "asked for after one"
            raise WorkerDied(f"{loss.why}; no checkpoint was whole: the run cannot go back to one") from None
        except Exception as failure:
            if loss is not None and isinstance(failure, ConfigError):  # what a cluster has left may be too little
                raise GivenUp(f"{loss.why}; {failure}; checkpoints are kept: the same command goes on") from failure
            loss = _worker_loss(failure, config, restarts)
            if leave.asked:
                raise Left(f"after {loss.why}, with what was saved before") from failure
            server = None if server is not None and server.has_ended() else server


def _worker_loss(failure: Exception, config: JobConfig, restarts: Restarts) -> WorkerLoss:
    """The loss after which all go back to the last checkpoint. Raises the failure where they cannot."""
    death = next((part for part in parts_of(failure) if isinstance(part, WorkerDied | EngineDied | LostEngine)), None)
    if death is None or isinstance(death, GivenUp) or not restarts.limit:
        raise failure
    if not config.checkpoint.every:
        raise WorkerDied(f"{death}; nothing was saved: checkpoint.every=10 would have let the run go on") from failure
    loss = WorkerLoss(how(death), roles_in(str(death)), time.monotonic())
    if not restarts.allow(loss.roles):
        raise GivenUp(f"{death}; {restarts.used_up}") from failure
    restarts.count(loss.roles)
    return loss


def _attempt(
    config: JobConfig,
    plan: JobPlan,
    seed: int,
    results: Path,
    console: Console,
    leave: LeaveRequest,
    server: ForkServer | None,
    restarts: Restarts,
    loss: WorkerLoss | None,
) -> Path:
    """Run from the newest checkpoint on, where there is one. loss: what ended the attempt before; then there has to
    be."""
    identity = RunIdentity(
        experiment=config.experiment,
        cell=cell_name(config),
        seed=seed,
        schedule=config.schedule.name,
        model=config.model.name,
        engine=config.engine.name,
        backend=plan.backend,
        smoke=config.smoke,
        trial=plan.trial,
    )
    recorded = run_to_replay(config, seed)
    replay = None if recorded is None else Replay.read(recorded, config, seed, plan.placement)
    earlier = EarlierAttempt(
        console,
        ignored=config.force and loss is None,
        begin_with=run_to_begin_with(config, seed),
        required=loss is not None,
        inputs=inputs_of(config),
    )
    with run_directory(config, seed, results, kept=earlier) as folder, ExitStack() as stack:
        load = LoadWatch(None if server is None else server.above)

        def logged(manifest: Mapping[str, Any]) -> LoggedRun:
            say = partial(console.print, style="yellow", highlight=False, soft_wrap=True, markup=False)
            return LoggedRun(folder, results, identity, plain(config), manifest, say)

        task = make_task(config) if plan.backend == "real" else None
        if earlier.trained:
            manifest = load_manifest(folder.path)
            loggers = stack.enter_context(Loggers(config.loggers, logged(manifest)))
            folder.merge_parts(_texts(config, task))
            _write_end(folder, loggers)
            return folder.path
        manifest = _manifest(identity, config, earlier, recorded, task)
        folder.write_config(plain(config))
        folder.write_manifest(manifest)
        spec = RunSpec(
            dataclasses.replace(config, eval=settled_evaluation(config, task)),
            make_schedule(config),
            plan,
            _initial_model(config, task, results, console),
            seed,
            folder.path / LOGS,
            folder.path.absolute() / CHECKPOINTS,
            earlier.checkpoint,
            last_evaluated(folder.path),
            replay,
            lambda: leave.asked,
            restarts,
            server,
        )
        runner = stack.enter_context(event_loop(plan))
        session = Session(spec, clock_of(plan, runner.get_loop()))
        session.recorder.listeners.append(FolderListener(folder))
        session.recorder.write_into(folder)
        if loss is not None and earlier.checkpoint is not None:
            session.recorder.listeners.append(_WentBack(session, loss, earlier.checkpoint.version))
        open_loggers = partial(Loggers, config.loggers, logged(manifest))
        with _leaving_at_once(leave):
            loggers = _start(stack, runner, session, open_loggers, console)
        session.recorder.listeners.append(loggers)
        with ProgressDisplay(console, _title(identity, config), config.iterations) as display:
            session.recorder.listeners.append(display)
            if (buffer := session.assembly.job.prompts.dealer.buffer) is not None:
                session.recorder.listeners.append(IterationListener(lambda _: folder.write_buffer(buffer.state())))
            run_in(runner, session.measure())
        folder.write_manifest(manifest | {"load": load.so_far()})
        with console.status("writing results"):
            if config.save_weights and plan.backend == "real":
                run_in(runner, _save_models(session.assembly.worlds, folder, spec, manifest))
            session.recorder.write(folder, _texts(config, task))
            _write_end(folder, loggers)
    return folder.path


def _manifest(
    identity: RunIdentity, config: JobConfig, earlier: EarlierAttempt, recorded: Path | None, task: Task | None
) -> dict[str, Any]:
    """recorded: the run that this one replays; task: of a real run."""
    manifest = build_manifest(identity, {"run": identity.seed, "warm_start": 0, "weights": 0})
    manifest["inputs"] = [dataclasses.asdict(one) for one in inputs_of(config)]
    manifest["plugins"] = [dataclasses.asdict(plugin) for plugin in plugins_of(config)]
    if census := getattr(task, "census", None):
        manifest["data"] = census
    if earlier.resumed:
        manifest["resumed"] = earlier.resumed
    if earlier.begun_with is not None:
        manifest["begun_with"] = earlier.begun_with
    if recorded is not None:
        manifest["replays"] = str(recorded)
    return manifest


class FolderListener(RunListener):
    """Writes iterations and evaluations into the run's folder, and, as long as engines are served, their address and
    token, in a file that only its owner can read."""

    def __init__(self, folder: RunDirectory) -> None:
        self._folder = folder

    def iteration(self, metrics: Mapping[str, float]) -> None:
        self._folder.append_metrics(metrics)

    def evaluated(self, found: Evaluated) -> None:
        self._folder.append_evaluation(dataclasses.asdict(found))

    @contextmanager
    def served(self, url: str, token: str) -> Iterator[None]:
        path = self._folder.path / MEMBERSHIP
        try:
            path.touch(mode=0o600)
            path.write_text(json.dumps({"url": url, "token": token}))
            yield
        finally:
            path.unlink()


class _WentBack(RunListener):
    """Notes that all roles went back to a version, in the time of the run, which goes on where the checkpoint was
    made."""

    def __init__(self, session: Session, loss: WorkerLoss, version: int) -> None:
        self._session, self._loss, self._version = session, loss, version

    def begun(self) -> None:
        loss, at = self._loss, round(self._session.clock.now(), 3)
        took, what = round(time.monotonic() - loss.noticed, 3), f"all went back to version {self._version}"
        self._session.recorder.restarted(Restart(loss.roles, loss.why, what, at, took))


def _title(identity: RunIdentity, config: JobConfig) -> str:
    parts = [identity.schedule, identity.model, config.task.name, f"seed {identity.seed}"]
    return " | ".join([*parts, identity.how_timed])


def _initial_model(config: JobConfig, task: Task | None, results: Path, console: Console) -> ModelConfig:
    """Only a real run, which has a task, starts from weights."""
    if task is None:
        return config.model
    if summary := getattr(task, "summary", None):  # what was read, and what was left out
        console.print(summary, highlight=False, soft_wrap=True)
    doing = "drawing weights (once per model, where engines read files)"
    if config.model.checkpoint is not None:
        doing = f"looking for {config.model.checkpoint}"
    elif config.model.warm_start:
        doing = "making the warm start (once per model and task, half a minute on two free cores)"
    with console.status(doing):
        return initial_model(config.model, task, results, in_files=engine_reads_files(config.engine.name))


def _start(
    stack: ExitStack, runner: asyncio.Runner, session: Session, open_loggers: Callable[[], Loggers], console: Console
) -> Loggers:
    """Bring everything up. MLflow takes seconds to load and to make its database: the roles start meanwhile."""
    cluster = cluster_address()
    what = "starting the queue" if cluster is None else f"waiting for the Ray cluster at {cluster} to place the workers"
    with waiting_for(console, what) as say, ThreadPoolExecutor(1) as background:
        loggers = background.submit(open_loggers)
        session.start(stack)
        run_in(runner, session.connect(say))
        say("waiting for loggers, such as MLflow")
        return stack.enter_context(loggers.result())


@contextmanager
def _leaving_at_once(leave: LeaveRequest) -> Iterator[None]:
    """SIGTERM ends what is within it at once, also where checkpoints are made: there is nothing yet that one would
    keep. Raises Left."""
    if leave.at_once:
        yield
        return
    if leave.asked:
        raise Left("before it began")
    leave.at_once = True
    try:
        yield
    except KeyboardInterrupt:
        if leave.asked:
            raise Left("before it began") from None
        raise
    finally:
        leave.at_once = False


async def _save_models(
    worlds: Mapping[str, Sequence[Handle[RememberingRole]]],
    folder: RunDirectory,
    run: RunSpec,
    manifest: Mapping[str, Any],
) -> None:
    """The policy, and the critic where there is one."""
    training, size = run.config.training, parameters(run.model)
    rate = peak_rate(policy_settings(run.config.algorithm, training, size), size)
    tokenizer = tokenizer_of(run.config)
    with _unfinished(folder.path / MODEL) as model:
        write_beside(model, tokenizer, model_card(manifest, load_config(folder.path), rate))
        ends = tokenizer.stop_tokens, tokenizer.pad_token
        await ask_all(worlds["actor"], lambda rank: rank.save_policy(str(model), run.model, training, *ends))
    if "critic" in worlds:
        with _unfinished(folder.path / CRITIC) as model:
            await ask_all(worlds["critic"], lambda rank: rank.save_critic(str(model), run.model))


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when all is there."""
    unfinished = folder.with_name(f".{folder.name}")
    unfinished.mkdir()
    yield unfinished
    unfinished.rename(folder)


def _texts(config: JobConfig, task: Task | None) -> Texts | None:
    """The texts that a run keeps whose samples are of a task."""
    if task is None or not config.texts.samples:
        return None
    return Texts(task.decode, config.texts.samples, config.texts.characters)


def _write_end(folder: RunDirectory, loggers: Loggers) -> None:
    """Write what follows from samples, trace and ledger, which are there."""
    from harness.report.plots import draw_run

    folder.write_summary(summary_of(run_of(folder.path)))
    draw_run(folder.path)
    loggers.finish()
    folder.finish()
