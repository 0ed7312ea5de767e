"""One run: a configuration and a seed, from an empty folder to DONE."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.config import JobConfig, ModelConfig
from harness.config.checks.job import JobPlan
from harness.config.compose import cell_name, make_schedule, plain, plugins_of
from harness.config.inputs import inputs_of
from harness.cost_model.shape import parameters
from harness.driver.backends import RunSpec, clock_of, event_loop
from harness.driver.checkpoint_files import CHECKPOINTS
from harness.driver.earlier import EarlierAttempt
from harness.driver.final_model import model_card, write_critic_files, write_model_files
from harness.driver.initial_weights import initial_model
from harness.driver.progress import ProgressDisplay
from harness.driver.session import Session
from harness.metrics.manifest import HOW_TIMED, RunIdentity, build_manifest
from harness.metrics.run_files import (
    CRITIC,
    MODEL,
    RunDirectory,
    load_config,
    load_metrics,
    mirrored_files,
    run_directory,
)
from harness.metrics.system import LoadWatch, SystemSampler
from harness.rl.learning_rate import peak_rate
from harness.runtime.fork_server import ForkServer
from harness.runtime.interrupts import run_in
from harness.runtime.runtime import Handle, ask_all
from harness.tasks import make_task, tokenizer_of
from harness.workers.actor import ActorRole
from harness.workers.critic import CriticRole

MEMBERSHIP = "membership.json"
LOGS = "logs"


def run_seed(
    config: JobConfig, plan: JobPlan, seed: int, results: Path, console: Console, server: ForkServer | None = None
) -> Path:
    """Run one seed and return its folder. Whatever ends it early leaves no DONE, no lock and no process. server: forks
    its workers, and stays for other runs."""
    identity = RunIdentity(
        experiment=config.experiment,
        cell=cell_name(config),
        seed=seed,
        schedule=config.schedule.name,
        model=config.model.name,
        engine=config.engine.name,
        backend=plan.backend,
        smoke=config.smoke,
    )
    earlier = EarlierAttempt(console, ignored=config.force)
    with run_directory(config, seed, results, kept=earlier) as folder, ExitStack() as stack:
        load = LoadWatch(None if server is None else server.above)
        manifest = build_manifest(identity, {"run": seed, "warm_start": 0, "weights": 0})
        manifest["inputs"] = [dataclasses.asdict(one) for one in inputs_of(config)]
        manifest["plugins"] = [dataclasses.asdict(plugin) for plugin in plugins_of(config)]
        if earlier.resumed:
            manifest["resumed"] = earlier.resumed
        folder.write_config(plain(config))
        folder.write_manifest(manifest)
        spec = RunSpec(
            config,
            make_schedule(config),
            plan,
            _initial_model(config, plan, results, console),
            seed,
            folder.path / LOGS,
            folder.path / CHECKPOINTS,
            earlier.checkpoint,
            server,
        )
        runner = stack.enter_context(event_loop(plan))
        session = Session(spec, clock_of(plan, runner.get_loop()))
        session.recorder.listeners.append(folder.append_metrics)
        session.recorder.write_into(folder)
        session.file_sizes = folder.file_sizes
        session.recorder.on_evaluated = lambda found: folder.append_evaluation(dataclasses.asdict(found))
        session.publish_address = partial(_written_address, folder)
        open_mirror = partial(_mirror, folder, results, identity, config, manifest, console)
        mirror = _start(stack, runner, session, open_mirror, console)
        for before in load_metrics(folder.path):
            mirror.log(before)  # MLflow has a run for each attempt, the last one whole
        session.recorder.listeners.append(mirror.log)
        with ProgressDisplay(console, _title(identity, config), config.iterations) as display:
            session.recorder.listeners.append(display.iteration)
            session.recorder.on_doing = display.doing
            if (buffer := session.assembly.job.prompts.dealer.buffer) is not None:
                session.recorder.listeners.append(lambda metrics: folder.write_buffer(buffer.state()))
            run_in(runner, session.measure())
        folder.write_manifest(manifest | {"load": load.so_far()})
        with console.status("writing results"):
            if config.save_weights and plan.backend == "real":
                run_in(runner, _save_model(session.trainers, folder, spec, manifest))
                if session.assembly.critics:
                    run_in(runner, _save_critic(session.assembly.critics, folder, spec))
            session.recorder.write(folder)
            _draw(folder)
            mirror.finish()
        folder.finish()
    return folder.path


@contextmanager
def _written_address(folder: RunDirectory, url: str, token: str) -> Iterator[None]:
    """The address and token of the served engines, in a file that only its owner can read, as long as they are
    served."""
    path = folder.path / MEMBERSHIP
    try:
        path.touch(mode=0o600)
        path.write_text(json.dumps({"url": url, "token": token}))
        yield
    finally:
        path.unlink()


def _title(identity: RunIdentity, config: JobConfig) -> str:
    parts = [identity.schedule, identity.model, config.task.name, f"seed {identity.seed}"]
    return " | ".join([*parts, HOW_TIMED[identity.backend]])


def _initial_model(config: JobConfig, plan: JobPlan, results: Path, console: Console) -> ModelConfig:
    """Only a real run starts from weights."""
    if plan.backend != "real":
        return config.model
    task = make_task(config)
    if summary := getattr(task, "summary", None):  # what was read, and what was left out
        console.print(summary, highlight=False, soft_wrap=True)
    doing = "making the warm start (once per model and task, about 20 s)"
    if config.model.checkpoint is not None:
        doing = f"looking for {config.model.checkpoint}"
    with console.status(doing):
        return initial_model(config.model, task, results)


def _start(
    stack: ExitStack,
    runner: asyncio.Runner,
    session: Session,
    open_mirror: Callable[[], Mirror],
    console: Console,
) -> Mirror:
    """Bring everything up. MLflow takes seconds to load and to make its database: the roles start meanwhile."""
    with console.status("starting the queue") as status, ThreadPoolExecutor(1) as background:
        mirror = background.submit(open_mirror)
        session.start(stack)
        run_in(runner, session.connect(status.update))
        status.update("waiting for MLflow")
        return stack.enter_context(mirror.result())


def _mirror(
    folder: RunDirectory,
    results: Path,
    identity: RunIdentity,
    config: JobConfig,
    manifest: dict[str, Any],
    console: Console,
) -> Mirror:
    return Mirror(folder, results, identity, plain(config), manifest, console)


async def _save_model(
    trainers: Sequence[Handle[ActorRole]], folder: RunDirectory, run: RunSpec, manifest: Mapping[str, Any]
) -> None:
    """The folder gets its name when all of it is there."""
    unfinished = folder.path / f".{MODEL}"
    unfinished.mkdir()
    rate = peak_rate(run.config.algorithm, parameters(run.model))
    card = model_card(manifest, load_config(folder.path), rate)
    write_model_files(unfinished, run.model, tokenizer_of(run.config), card)
    await ask_all(trainers, lambda actor: actor.save_weights(str(unfinished)))
    unfinished.rename(folder.path / MODEL)


async def _save_critic(critics: Sequence[Handle[CriticRole]], folder: RunDirectory, run: RunSpec) -> None:
    """As `_save_model`."""
    unfinished = folder.path / f".{CRITIC}"
    unfinished.mkdir()
    write_critic_files(unfinished, run.model)
    await ask_all(critics, lambda critic: critic.save_weights(str(unfinished)))
    unfinished.rename(folder.path / CRITIC)


def _draw(folder: RunDirectory) -> None:
    from harness.report.plots import draw_run

    draw_run(folder.path)


class Mirror:
    """As a context manager it samples the machine until `finish`, or until the run fails.

    The loss of the mirror is reported once, on the console and in the run's folder, and the run goes on.
    """

    def __init__(
        self,
        folder: RunDirectory,
        results: Path,
        identity: RunIdentity,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        console: Console,
    ) -> None:
        """Creates the run in MLflow, which takes seconds to load. config, manifest: as in the folder, which the caller
        holds."""
        from harness.metrics.mlflow_mirror import Tracker

        self._folder, self._console = folder, console
        self._tracker = Tracker(results, identity, config, manifest, on_lost=self._report_loss)
        self._sampler = SystemSampler([folder.append_system, self._tracker.log_system])
        self.log = self._tracker.log

    def finish(self) -> None:
        """Every other file is there: store them, and end the run in MLflow."""
        self._sampler.close()
        self._tracker.finish(artifacts=mirrored_files(self._folder.path))

    def __enter__(self) -> Mirror:
        self._sampler.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._sampler.close()
        finally:
            self._tracker.__exit__(*exception)

    def _report_loss(self, why: str) -> None:
        self._folder.mirror_is_incomplete(why)
        message = f"MLflow mirror incomplete: {why}; the run goes on, and `make mlflow-sync` catches up from its files"
        self._console.print(message, style="yellow", highlight=False, soft_wrap=True, markup=False)
