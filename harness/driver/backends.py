"""The three backends: what time is, where workers run, which engines they have, and what carries weights."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from harness.checks.job import JobPlan
from harness.config import JobConfig, ModelConfig
from harness.cost_model.job_cost import simulated_cost
from harness.cost_model.transfer import sender_links
from harness.driver import PRELOAD
from harness.driver.checkpoint_files import Checkpoint
from harness.driver.engine_factories import EngineFactory, RealEngines, SimulatedEngines
from harness.driver.restarts import Restarts
from harness.protocols import Clock
from harness.rpc.sockets import forget, meeting_place
from harness.runtime.fork_server import ForkServer
from harness.runtime.runtime import RealClock, RoleName, Runtime, cluster_address
from harness.runtime.stores import open_store
from harness.runtime.virtual_runtime import VirtualClock, VirtualLoop, VirtualRuntime
from harness.weight_sync.coordinator import WeightTransport
from harness.weight_sync.simulated import SimulatedTransport
from harness.weight_sync.transports import GroupTransport, LocalTransport
from harness.workers.replaying import Replay
from schedules import Schedule


@dataclass(frozen=True)
class RunSpec:
    """One seed of a job, and what its parts are told of it, a field for each. model: with the checkpoint to start from,
    where there is one."""

    config: JobConfig
    schedule: Schedule
    plan: JobPlan
    model: ModelConfig
    seed: int
    logs: Path | None = None
    """Folder where workers write what they print; nowhere without it."""
    checkpoints: Path | None = None
    """Folder where checkpoints are made, if the settings say so; nowhere without it."""
    resumed: Checkpoint | None = None
    """The checkpoint that the run goes on from."""
    evaluated: int = -1
    """Version that earlier attempts evaluated last."""
    replay: Replay | None = None
    """The recording of another run that this one is to do again."""
    leave: Callable[[], bool] = lambda: False
    """Whether the run is to end at the next checkpoint, which it then makes as soon as it can."""
    restarts: Restarts = field(default_factory=lambda: Restarts(0))
    """How often roles that die may be started again."""
    server: ForkServer | None = None
    """The server that forks the workers, and outlives the run; without it the run has one of its own."""

    @property
    def turn_timeout_s(self) -> float | None:
        """The longest wait for a device: what holds it may be a whole piece of work of another role. None on a clock
        that jumps, where a wait that never ends is a Deadlock at once, and where engines hold it for as long as samples
        take while stages stream."""
        unlimited = self.plan.backend == "virtual" or self.schedule.in_rounds
        return None if unlimited else self.config.cluster.call_timeout_s


@dataclass(frozen=True)
class RunBackend:
    """The ground that a run stands on."""

    clock: Clock
    runtime: Runtime
    engines: EngineFactory
    transport: WeightTransport
    kept: object = None
    """Has to live as long as the job."""


def open_backend(run: RunSpec, clock: Clock, stack: ExitStack) -> RunBackend:
    """real: workers around engines that compute. paced: workers, queue and weight transfers around engines that last as
    long as the cost model says. virtual: everything in this process, on a clock that jumps.

    The stack ends what was started.
    """
    transport, timeout_s = run.schedule.transport, run.config.cluster.wait_timeout_s
    if run.plan.backend == "virtual":
        simulated = _simulated_engines(run)
        in_time = SimulatedTransport(transport, simulated.times, clock)
        return RunBackend(clock, VirtualRuntime(), simulated, LocalTransport() if run.schedule.colocated else in_time)
    runtime = stack.enter_context(_runtime(run))
    paced = run.plan.backend == "paced"
    carry: WeightTransport
    if run.schedule.colocated:
        devices = run.plan.placement.devices
        with_engine = devices["rollout"][:: run.config.engine.tensor_parallel]
        helpers = [rank for rank, device in enumerate(devices["actor"]) if device not in with_engine]
        carry = LocalTransport(() if paced else helpers)
    else:
        carry = group = GroupTransport(transport, runtime.host_of, timeout_s)
        stack.callback(group.close)
    if paced:
        return RunBackend(clock, runtime, _simulated_engines(run), carry)
    world = len(run.plan.placement.devices["actor"])
    # The store of the training world lives here, so that no rank has to be up before the others know where to meet.
    place = meeting_place(runtime.host)
    stack.callback(forget, place)
    store, place = open_store(place, world, timeout_s)
    plan = run.plan
    critics = len(plan.placement.devices.get("critic", ()))
    engines = RealEngines(run.config, run.model, run.seed, plan.gpu, world, place, plan.shares, critics)
    return RunBackend(clock, runtime, engines, carry, kept=store)


def _simulated_engines(run: RunSpec) -> SimulatedEngines:
    config, placement, transport = run.config, run.plan.placement, run.schedule.transport
    training, engine = len(placement.devices["actor"]), config.engine.tensor_parallel
    together = config.training.ranks_together
    return SimulatedEngines(
        config,
        simulated_cost(config, placement),
        run.seed,
        transport,
        sender_links=sender_links(config, transport, training, engine),
        data_parallel={role: len(devices) // together for role, devices in placement.devices.items()},
        paced=run.plan.backend == "paced",
        costs={
            role: simulated_cost(config, placement, role) for role in ("lent", "critic") if role in placement.devices
        },
    )


def event_loop(plan: JobPlan) -> asyncio.Runner:
    """The loop that the schedule runs in."""
    return asyncio.Runner(loop_factory=VirtualLoop if plan.backend == "virtual" else None)


def clock_of(plan: JobPlan, loop: asyncio.AbstractEventLoop) -> Clock:
    """The clock of a plan's backend."""
    return VirtualClock(loop) if plan.backend == "virtual" else RealClock.starting_now()


def _runtime(run: RunSpec):  # type: ignore[no-untyped-def]  # loading Ray takes a second, where it is needed
    """Processes of this machine, or, where RAY_ADDRESS says that there is one, of a cluster."""
    cluster, placement, gpu = run.config.cluster, run.plan.placement, run.plan.gpu
    start_s, call_s = cluster.wait_timeout_s, cluster.call_timeout_s
    if (address := cluster_address()) is not None:
        from harness.runtime.ray_cluster import ClusterSettings, RayCluster

        settings = ClusterSettings(
            address,
            placement,
            gpu=gpu,
            start_timeout_s=start_s,
            call_timeout_s=call_s,
            silence_s=cluster.heartbeat_timeout_s,
            per_engine=run.config.engine.tensor_parallel,
            together=run.config.training.ranks_together,
            logs=run.logs,
            reads=[] if run.plan.backend != "real" or run.model.checkpoint is None else [Path(run.model.checkpoint)],
            writes=partial(_writes_results, run),
        )
        return RayCluster(settings)
    from harness.runtime.local_runtime import LocalRuntime

    return LocalRuntime(
        gpu=gpu, start_timeout_s=start_s, call_timeout_s=call_s, logs=run.logs, preload=PRELOAD, server=run.server
    )


def _writes_results(run: RunSpec, role: RoleName) -> bool:
    """Whether this role, wherever it is, writes into the folder of results."""
    kind, rank = role
    checkpoints = run.checkpoints is not None and (run.config.checkpoint.every > 0 or run.resumed is not None)
    weights = run.config.save_weights and rank == 0 and run.plan.backend == "real"
    return kind in ("actor", "critic") and (checkpoints or weights)
