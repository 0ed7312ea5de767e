"""The three backends: what time is, where workers run, which engines they have, and what carries weights."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from engines.simulated.passes import LockedDevice, SharedDevice
from harness.config import JobConfig, ModelConfig
from harness.config.checks.job import JobPlan
from harness.cost_model.cost import transfer_times
from harness.cost_model.job_cost import simulated_cost
from harness.driver.build import EngineFactory, RealEngines, SimulatedEngines
from harness.protocols import Clock
from harness.runtime.runtime import RealClock, Runtime
from harness.runtime.virtual_runtime import VirtualClock, VirtualLoop, VirtualRuntime
from harness.weight_sync.simulated import SimulatedTransport
from harness.weight_sync.transports import GroupTransport, WeightTransport
from schedules import Schedule


@dataclass(frozen=True)
class RunSpec:
    """One seed of a job. model: with the checkpoint to start from, where there is one."""

    config: JobConfig
    schedule: Schedule
    plan: JobPlan
    model: ModelConfig
    seed: int

    @property
    def wait_timeout_s(self) -> float | None:
        """The longest wait for rows; None on a clock that jumps, where a wait that never ends is a Deadlock at once."""
        return None if self.plan.backend == "virtual" else self.config.cluster.wait_timeout_s


@dataclass(frozen=True)
class Backend:
    """What a run stands on."""

    clock: Clock
    runtime: Runtime
    engines: EngineFactory
    transport: WeightTransport
    kept: object = None
    """Has to live as long as the job."""


def open_backend(run: RunSpec, clock: Clock, stack: ExitStack) -> Backend:
    """real: Ray workers around engines that compute. paced: Ray workers, queue and weight transfers around engines that
    last as long as the cost model says. virtual: everything in this process, on a clock that jumps.

    The stack ends what was started.
    """
    transport, timeout_s = run.schedule.transport, run.config.cluster.wait_timeout_s
    if run.plan.backend == "virtual":
        simulated = _simulated_engines(run, clock, None)
        in_time = SimulatedTransport(transport, transfer_times(simulated.cost, transport), clock)
        return Backend(clock, VirtualRuntime(), simulated, in_time)
    locks = stack.enter_context(tempfile.TemporaryDirectory(prefix="cadence-devices-"))
    runtime = stack.enter_context(_ray(run))
    if run.plan.backend == "paced":
        engines: EngineFactory = _simulated_engines(run, clock, Path(locks))
        return Backend(clock, runtime, engines, GroupTransport(transport, runtime.host, timeout_s))
    world = len(run.plan.placement.devices["actor"])
    # The store of the training world lives here, so that no rank has to be up before the others know where to meet.
    store = TCPStore(runtime.host, 0, world, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    engines = RealEngines(run.config, run.model, run.seed, run.plan.gpu, world, (runtime.host, store.port))
    return Backend(clock, runtime, engines, GroupTransport(transport, runtime.host, timeout_s), kept=store)


def _simulated_engines(run: RunSpec, clock: Clock, locks: Path | None) -> SimulatedEngines:
    """locks: a folder by which processes agree whose turn it is on a device; None where all are in this one. Roles of
    one pool have the same device."""
    config, placement, timeout_s = run.config, run.plan.placement, run.config.cluster.wait_timeout_s
    pools = {
        devices: SharedDevice(clock)
        if locks is None
        else LockedDevice(locks / f"device-{devices[0]}", clock, timeout_s=timeout_s)
        for devices in placement.devices.values()
    }
    rank_devices = config.training.tensor_parallel * config.training.pipeline_parallel
    return SimulatedEngines(
        config,
        simulated_cost(config, placement),
        run.seed,
        run.schedule.transport,
        devices={role: pools[devices] for role, devices in placement.devices.items()},
        data_parallel={role: len(devices) // rank_devices for role, devices in placement.devices.items()},
        paced=locks is not None,
    )


def event_loop(plan: JobPlan) -> asyncio.Runner:
    """The loop that the schedule runs in."""
    return asyncio.Runner(loop_factory=VirtualLoop if plan.backend == "virtual" else None)


def clock_of(plan: JobPlan, loop: asyncio.AbstractEventLoop) -> Clock:
    return VirtualClock(loop) if plan.backend == "virtual" else RealClock.starting_now()


def _ray(run: RunSpec):  # type: ignore[no-untyped-def]  # a RayRuntime: loading Ray takes a second, when it is needed
    from harness.runtime.ray_runtime import RayRuntime

    cluster = run.config.cluster
    return RayRuntime(
        run.plan.placement,
        gpu=run.plan.gpu,
        start_timeout_s=cluster.wait_timeout_s,
        call_timeout_s=cluster.call_timeout_s,
    )
