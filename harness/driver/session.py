"""One job under one schedule on one backend, from its parts to its last iteration; writes nothing."""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from typing import Any

from harness.checks.job import plan_job
from harness.config import JobConfig, RooflineConfig
from harness.config.compose import EXPERIMENTS, make_schedule, read_settings
from harness.config.machine import NO_MACHINE, gpu_kind
from harness.config.placement import ENGINE_ROLES, Placement, host_roles
from harness.cost_model.shape import adapter_parameters
from harness.driver.assemble import Assembly, assemble
from harness.driver.backends import RunBackend, RunSpec, clock_of, event_loop, open_backend
from harness.driver.checkpoint_files import QUEUE, Checkpoint, Cut
from harness.driver.listeners import IterationListener
from harness.driver.prompts import Finished, finished_rows
from harness.driver.recorder import Recorder
from harness.driver.restarts import GivenUp, Restarts
from harness.metrics.arrivals import FORMAT, RunOf
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Clock
from harness.runtime.heartbeats import Beating, Heartbeats, QueueBeat
from harness.runtime.interrupts import run_in
from harness.runtime.runtime import (
    Handle,
    Progress,
    RealClock,
    WaitingRole,
    WorkerDied,
    ask_all,
    parts_of,
    watch_progress,
)
from harness.runtime.virtual_runtime import VirtualClock, VirtualLoop, infrequent_gc
from harness.runtime.worker_client import RemoteRole
from harness.tasks import environment_of, extra_metrics, make_task
from harness.transfer_queue.remote.client import RemoteQueue
from harness.weight_sync.membership import LostEngine
from harness.workers.dataflow import ROLLOUT_COLUMNS, ROUTES
from harness.workers.recording import RecordingSettings, RunLengthDecoder, SampleDecoder, TokenDecoder, Work


def _work(run: RunSpec) -> Work | None:
    """Operations of the run's samples, where the peak of its devices is known: of those that a roofline is of, or of
    GPUs here that are known by name."""
    config, plan = run.config, run.plan
    if plan.backend != "real":
        peak = config.device.flops if isinstance(config.cost, RooflineConfig) else None
    else:
        kind = gpu_kind() if plan.gpu else None
        peak = None if kind is None else float(read_settings(EXPERIMENTS / "device" / f"{kind}.yaml")["flops"])
    scorings = (
        len({"reference", "actor_fwd", "critic"} & plan.placement.devices.keys()) + config.algorithm.freezes_proximal
    )
    epochs = config.algorithm.epochs * (1 + config.algorithm.has_critic)
    adapters = adapter_parameters(run.model, config.training)
    return None if peak is None else Work(run.model, scorings, peak, epochs, adapters)


def _recording(run: RunSpec) -> RecordingSettings:
    config, most = run.config, run.config.algorithm.max_token_staleness
    # Samples that run as new weights come go on with what older ones put into their caches.
    goes_on = not run.schedule.in_rounds and getattr(run.schedule, "pause", "keep") == "keep"
    keeps_cache = config.engine.keep_cache and goes_on
    decoder: SampleDecoder = RunLengthDecoder(config.cost.prompt_tokens, keeps_cache, most)
    several_turns = config.cost.turns is not None
    if run.plan.backend == "real":
        task = make_task(config)
        decoder = TokenDecoder(extra_metrics(task), keeps_cache, most)
        several_turns = environment_of(task) is not None
    return RecordingSettings(
        decoder,
        config.algorithm.group_size,
        steps_per_version=config.algorithm.steps_per_version,
        several_turns=several_turns,
        filters=config.algorithm.filters,
        limits_samples=config.engine.sample_limit_s is not None,
        work=_work(run),
        run_of=RunOf(FORMAT, run.seed, config.iterations, config.algorithm.group_size),
        check=None if run.replay is None else run.replay.check,
    )


def worker_places(
    placement: Placement, *, pooled: bool, host: Sequence[str], per_engine: int = 1
) -> dict[tuple[str, str], Place]:
    """The place of each worker, for the timeline: (role, worker) -> its pool and devices. A simulated (`pooled`) role
    is one worker that stands for all its devices, save engines, which each have `per_engine` of their own.
    host: the roles there."""
    found: dict[tuple[str, str], Place] = {}
    for pool, devices in placement.pools.items():
        names = tuple(f"device {device}" for device in devices)
        for role in (role for role, its in placement.devices.items() if its == devices):
            if pooled and role not in ENGINE_ROLES:
                found[role, "0"] = Place(pool, names)
            else:
                size = per_engine if role in ENGINE_ROLES else 1
                parts = [names[start : start + size] for start in range(0, len(names), size)]
                found |= {(role, str(number)): Place(pool, part) for number, part in enumerate(parts)}
    return found | {(role, "0"): Place(f"host {role}", (f"host {role}",)) for role in host}


class Session:
    """start, connect, measure; then the recorder knows everything."""

    def __init__(self, run: RunSpec, clock: Clock) -> None:
        config, placement, real = run.config, run.plan.placement, run.plan.backend == "real"
        self.run, self.clock = run, clock
        self.recorder = Recorder(
            Timeline(
                worker_places(
                    placement,
                    pooled=not real,
                    per_engine=config.engine.tensor_parallel,
                    host=host_roles(config.algorithm),
                ),
                warmup=config.warmup_iterations,
            ),
            clock,
            _recording(run),
            devices=placement.total,
        )
        if run.resumed is not None:
            self.recorder.go_on_from(run.resumed)
        self._assembly: Assembly | None = None
        self._backend: RunBackend | None = None  # held as long as the job lives: workers meet at what it keeps

    @property
    def backend(self) -> RunBackend:
        """The ground that it stands on, once it was started."""
        assert self._backend is not None, "start comes first"
        return self._backend

    @property
    def assembly(self) -> Assembly:
        """The assembled job, once it was started."""
        assert self._assembly is not None, "start comes first"
        return self._assembly

    def start(self, stack: ExitStack) -> None:
        """Start all workers; the stack ends them."""
        self._backend = open_backend(self.run, self.clock, stack)
        self._assembly = assemble(self.run, self._backend, self.recorder, self.recorder.recording)
        watched: list[Beating] = [role for role in self._assembly.roles if isinstance(role, RemoteRole)]
        if isinstance(queue := self._assembly.queue, RemoteQueue):
            watched.append(QueueBeat(queue, self._backend.runtime.kill_queue))
        limit_s = self.run.config.cluster.heartbeat_timeout_s
        self._heartbeats = Heartbeats(watched, limit_s, free=self._assembly.coordinator.abort)

    async def connect(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Wait until every role is there, and bring the weight transport up on all sides. say: is told what for."""
        missing = [role.name for role in self.assembly.roles]

        async def made(role: Handle[WaitingRole]) -> None:
            await role.role.waiting()
            missing.remove(role.name)
            say(f"waiting for {', '.join(missing)} to load" if missing else "connecting the weight transport")

        say(f"waiting for {', '.join(missing)} to load")
        async with asyncio.TaskGroup() as tasks:
            for role in self.assembly.roles:
                tasks.create_task(made(role))
        await self.assembly.coordinator.connect()

    async def measure(self) -> None:
        """The schedule, from time 0 to the last version."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            loop.explain = self.assembly.waiting_now  # of workers in this process
        weights, resumed = self.assembly.job.weights, self.run.resumed
        weights.cut = self._cut
        try:
            if resumed is None:
                await self._watched(weights.evaluate(0))
                await self._start_clocks(0.0)
            async with self._served():
                if resumed is not None:
                    await self._watched(go_on_from(resumed, self.run, self.assembly, self._start_clocks))
                for listener in self.recorder.listeners:
                    listener.begun()
                await self._watched(self.assembly.run(self.run.schedule))
                await self._watched(self._finish())
        except Exception as failure:
            # A death shows first in a call of another worker: name the dead, not only the one that noticed.
            noticed = [str(part) for part in parts_of(failure) if isinstance(part, LostEngine | WorkerDied)][:1]
            if losses := [*noticed, *await self._died(noticed)]:
                given_up = any(isinstance(part, GivenUp) for part in parts_of(failure))
                raise (GivenUp if given_up else WorkerDied)("; ".join(losses)) from failure
            if (end := await self._end_of_queue()) is not None:
                raise WorkerDied(f"the queue died: {end}") from failure
            raise

    async def _finish(self) -> None:
        """Do what the last version leaves to be done."""
        weights = self.assembly.job.weights
        await weights.recorded()
        rest, note = self.recorder.after_the_last()
        note(await weights.record(rest))
        if weights.checkpoints is not None:
            await weights.checkpoints.finish()
        await weights.evaluate_last(self.run.config.iterations)
        await self.assembly.coordinator.finish()

    def _health(self) -> dict[str, Any]:
        """Health of the run and of each of its roles, as was last heard of them."""
        versions, doing = self.assembly.coordinator.versions, self.recorder.roles
        roles = [
            state | {"version": versions.get(state["name"]), "doing": doing.get(state["name"].partition("[")[0])}
            for state in self._heartbeats.states()
        ]
        return {"seconds": round(self.clock.now(), 3), "version": self.recorder.version, "roles": roles}

    async def _start_clocks(self, now: float) -> None:
        if isinstance(self.clock, RealClock):
            self.clock.restart(now)
            await self.backend.runtime.start_clocks(self.clock)
        elif now:
            assert isinstance(self.clock, VirtualClock)
            self.clock.restart(now)

    def _cut(self, version: int) -> Callable[[], Cut]:
        """The driver's knowledge as of now; the rest of it when the iteration is written down."""
        recorder, ledger = self.recorder, self.recorder.ledger.state()
        admitted = recorder.admitted_groups()
        prompts = self.assembly.job.prompts.state({one.group for one in admitted})

        def cut() -> Cut:
            at, state, (sizes, digests) = self.clock.now(), recorder.state(), recorder.growing_files()
            return Cut(version, at, ledger, admitted, prompts, state, sizes, digests=digests)

        return cut

    async def _end_of_queue(self) -> str | None:
        """Why it does not answer any more."""
        try:
            await self.assembly.queue.describe()
        except ConnectionError as error:
            return str(error)
        return None

    async def _died(self, noticed: Sequence[str]) -> list[str]:
        """How roles ended that `noticed` does not name, worker by worker; but for engines without which the run went
        on."""
        ends = self.run.config.cluster.on_lost_engine == "end"
        members = self.assembly.coordinator.membership.members
        lost = [member.name for member in members if member.health == "lost" and not ends]
        left = [role for role in self.assembly.roles if role.name not in lost]
        names = defaultdict[str, list[str]](list)
        for role, how in zip(left, await asyncio.gather(*(role.death() for role in left)), strict=True):
            if how is not None and role.name not in "".join(noticed):
                names[how].append(role.name)
        return [f"{', '.join(of)} died: {how}" for how, of in names.items()]

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """The engines over HTTP meanwhile, where that is wanted and time passes by itself."""
        if not self.run.config.cluster.serve_membership or not isinstance(self.clock, RealClock):
            yield
            return
        from harness.rpc.http_server import serving
        from harness.service.fleet_app import fleet_app
        from harness.service.metrics import run_text

        token, newest = secrets.token_urlsafe(32), dict[str, float]()
        self.recorder.listeners.append(IterationListener(newest.update))
        app = fleet_app(
            self.assembly.coordinator.fleet,
            token,
            now=self.clock.now,
            health=self._health,
            metrics=lambda: run_text(self._health(), newest),
        )
        async with serving(app) as url:
            with ExitStack() as stack:
                for listener in self.recorder.listeners:
                    stack.enter_context(listener.served(url, token))
                yield

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Work beside the watch for a stall, where time passes by itself."""
        if not isinstance(self.clock, RealClock):
            with infrequent_gc():
                return await work
        limit = self.run.config.cluster.stall_timeout_s
        with closing(Progress(self.assembly.roles)) as roles:

            async def progress() -> object:
                """Another one whenever anything happened: an event here, a micro-batch or a token anywhere."""
                return self.recorder.events, await roles.now()

            def leave() -> bool:
                """Leave as asked; a checkpoint that is being written takes its time; nothing else may happen then."""
                checkpoints = self.assembly.job.weights.checkpoints
                return self.run.leave() and (checkpoints is None or not checkpoints.writing)

            watch = watch_progress(progress, self.assembly.waiting, limit, self.clock, tell=self._quiet, leave=leave)
            async with asyncio.TaskGroup() as tasks:
                guards = [tasks.create_task(watch), tasks.create_task(self._heartbeats.watch())]
                await work
                for guard in guards:
                    guard.cancel()

    def _quiet(self, line: str) -> None:
        for listener in self.recorder.listeners:
            listener.quiet(line)


async def go_on_from(
    checkpoint: Checkpoint, run: RunSpec, assembly: Assembly, start_clocks: Callable[[float], Awaitable[None]]
) -> None:
    """Trainers are as they were, every engine and scorer has their weights, and the queue what was in flight: of that
    what rollout had finished, and prompts of the rest. Clocks start when all has been read."""
    cut, job = checkpoint.cut, assembly.job
    for world, ranks in assembly.worlds.items():
        folder = str(checkpoint.folder / world)
        await ask_all(ranks, lambda rank, folder=folder: rank.load_state(folder, cut.version))  # type: ignore[misc]
    admitted = job.prompts.recall(cut.prompts, {one.group: one.at for one in cut.admitted}, cut.refused)
    limit_of = None if run.schedule.order == "fifo" else run.schedule.capacity(job).limit
    algorithm, prompts = run.config.algorithm, job.prompts
    finished = finished_rows(
        checkpoint.folder / QUEUE,
        admitted.keys(),
        algorithm.group_size,
        limit_of,
        prompts.first_sample if run.config.refills else None,
        (*ROLLOUT_COLUMNS, *([ROUTES] if run.config.replays_routing else [])),
    )
    await start_clocks(_newest(cut, finished))
    await assembly.coordinator.distribute(cut.version)
    await assembly.coordinator.fleet.all_back()  # a schedule may deal its engines out as it begins
    if cut.kl_coefficient is not None:
        await assembly.advantages.role.go_on_with(cut.kl_coefficient)
    await prompts.restore(cut.prompts.partitions, admitted, finished)


def _newest(cut: Cut, finished: Mapping[str, Finished]) -> float:
    """Time of the newest that is kept: what was done after it is lost, and does not count."""
    return max([cut.at, *(refusal.at for refusal in cut.refused), *(kept.newest for kept in finished.values())])


def simulate(config: JobConfig, seed: int, started: Callable[[Session], None] = lambda session: None) -> Recorder:
    """Run `config` on the virtual clock, whatever its backend, and return what was recorded.

    started: is shown the session before time begins. Raises ConfigError for a job that cannot be, Deadlock for one that
    cannot go on.
    """
    config = replace(config, backend="virtual")
    schedule = make_schedule(config)
    plan = plan_job(config, schedule, NO_MACHINE)
    with ExitStack() as stack:
        runner = stack.enter_context(event_loop(plan))
        run = RunSpec(config, schedule, plan, config.model, seed, restarts=Restarts(config.restarts.limit))
        session = Session(run, clock_of(plan, runner.get_loop()))
        session.start(stack)
        run_in(runner, session.connect())
        started(session)
        run_in(runner, session.measure())
    return session.recorder
