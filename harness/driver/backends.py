"""The three backends: what time is, where workers run, and how they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from harness.config import JobConfig, ModelConfig
from harness.config.checks.job import Plan
from harness.driver.assemble import Kit
from harness.driver.readings import Measured, Reading, Simulated
from harness.protocols import Clock
from harness.runtime.runtime import RealClock, Runtime
from harness.runtime.virtual_runtime import VirtualClock, VirtualLoop
from harness.tasks import extra_metrics, make_task
from schedules import Schedule


@dataclass(frozen=True)
class Backend:
    """What a run stands on."""

    clock: Clock
    runtime: Runtime
    kit: Kit


@dataclass(frozen=True)
class Wanted:
    """What a run asks of its backend. model: with the checkpoint to start from, where there is one."""

    config: JobConfig
    schedule: Schedule
    plan: Plan
    model: ModelConfig
    seed: int


def open_real(wanted: Wanted, clock: Clock, stack: ExitStack) -> Backend:
    """Ray workers around engines that compute. The stack ends them."""
    from harness.driver.real_kit import RealKit

    assert isinstance(clock, RealClock)
    runtime = stack.enter_context(_ray(wanted))
    kit = RealKit(
        wanted.config,
        wanted.schedule,
        wanted.model,
        wanted.seed,
        wanted.plan.placement,
        gpu=wanted.plan.gpu,
        host=runtime.host,
        origin=clock.origin,
    )
    return Backend(clock, runtime, kit)


def open_paced(wanted: Wanted, clock: Clock, stack: ExitStack) -> Backend:
    """Ray workers, queue and weight sync, around engines that last as long as the cost model says."""
    from harness.driver.simulated_kit import PacedKit

    assert isinstance(clock, RealClock)
    runtime = stack.enter_context(_ray(wanted))
    kit = PacedKit(wanted.config, wanted.schedule, wanted.seed, wanted.plan.placement, runtime.host, clock.origin)
    return Backend(clock, runtime, kit)


def open_virtual(wanted: Wanted, clock: Clock, stack: ExitStack) -> Backend:
    """Everything in this process, on a clock that jumps."""
    from harness.driver.simulated_kit import VirtualKit
    from harness.runtime.virtual_runtime import VirtualRuntime

    kit = VirtualKit(wanted.config, wanted.schedule, wanted.seed, wanted.plan.placement, clock)
    return Backend(clock, VirtualRuntime(), kit)


OPEN: dict[str, Callable[[Wanted, Clock, ExitStack], Backend]] = {
    "real": open_real,
    "paced": open_paced,
    "virtual": open_virtual,
}


def event_loop(plan: Plan) -> asyncio.Runner:
    """The loop that the schedule runs in."""
    return asyncio.Runner(loop_factory=VirtualLoop if plan.backend == "virtual" else None)


def clock_of(plan: Plan, loop: asyncio.AbstractEventLoop) -> Clock:
    return VirtualClock(loop) if plan.backend == "virtual" else RealClock.starting_now()


def reading_of(config: JobConfig, plan: Plan) -> Reading:
    """How the trained samples of this backend are read."""
    if plan.backend != "real":
        return Simulated(config.cost.prompt_tokens)
    return Measured(extra_metrics(make_task(config)))


def _ray(wanted: Wanted):  # type: ignore[no-untyped-def]  # a RayRuntime: loading Ray takes a second, when it is needed
    from harness.runtime.ray_runtime import RayRuntime

    cluster = wanted.config.cluster
    return RayRuntime(
        wanted.plan.placement,
        gpu=wanted.plan.gpu,
        start_timeout_s=cluster.wait_timeout_s,
        call_timeout_s=cluster.call_timeout_s,
    )
