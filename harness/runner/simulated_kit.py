"""Simulated workers: the same roles around engines that let time pass, in this process or in processes of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engines.model import parameter_count
from harness.config import CostConfig, JobConfig
from harness.placement import Placement
from harness.protocols import Clock
from harness.runner.build_simulated import SimulatedRecipe, build_simulated
from harness.runtime.clock import RealClock
from harness.runtime.handles import Handle
from harness.runtime.runtime import Runtime
from harness.simulator.cost import resolved, transfer_times
from harness.simulator.devices import Device, LockedDevice, SharedDevice
from harness.simulator.workload import SimulatedTask
from harness.tasks import Task
from harness.transfer_queue import TransferQueue
from harness.weight_sync.simulated import SimulatedWire
from harness.weight_sync.wires import Wire, wire_of
from schedules import Schedule


def simulated_cost(config: JobConfig) -> CostConfig:
    """The costs of this job's model."""
    return resolved(config.cost, parameter_count(config.model))


def simulated_task(config: JobConfig) -> SimulatedTask:
    return SimulatedTask(config.cost.prompt_tokens, config.cost.lengths.cap)


@dataclass
class VirtualKit:
    """`harness.runner.assemble.Kit` for one process on a clock that jumps."""

    config: JobConfig
    schedule: Schedule
    seed: int
    placement: Placement
    clock: Clock

    @property
    def task(self) -> Task:
        return simulated_task(self.config)

    @cached_property
    def wire(self) -> Wire:
        transport = self.schedule.transport
        return SimulatedWire(transport, transfer_times(simulated_cost(self.config), transport), self.clock)

    @property
    def wait_timeout_s(self) -> float | None:
        return None

    def workers(self, role: str, devices: int) -> int:
        return devices if role == "rollout" else 1

    @cached_property
    def devices(self) -> Mapping[str, Device]:
        """The devices of each role; roles of one pool have the same."""
        pools = {devices: SharedDevice(self.clock) for devices in self.placement.devices.values()}
        return {role: pools[devices] for role, devices in self.placement.devices.items()}

    def start(self, role: str, count: int, runtime: Runtime, queue: TransferQueue) -> list[Handle]:
        recipe = _recipe(self.config, self.schedule, self.seed, self.placement, queue, self.clock, self.devices)
        return [runtime.start(role, n, build_simulated, job_role=role, recipe=recipe) for n in range(count)]


@dataclass
class PacedKit:
    """`harness.runner.assemble.Kit` for processes of their own: their queue and their weight transfers are real."""

    config: JobConfig
    schedule: Schedule
    seed: int
    placement: Placement
    host: str
    origin: float

    def __post_init__(self) -> None:
        self._locks = tempfile.TemporaryDirectory(prefix="cadence-devices-")  # gone when this is

    @property
    def task(self) -> Task:
        return simulated_task(self.config)

    @property
    def wire(self) -> Wire:
        return wire_of(self.schedule.transport, self.host, self.config.cluster.wait_timeout_s)

    @property
    def wait_timeout_s(self) -> float | None:
        return self.config.cluster.wait_timeout_s

    def workers(self, role: str, devices: int) -> int:
        return devices if role == "rollout" else 1

    def start(self, role: str, count: int, runtime: Runtime, queue: TransferQueue) -> list[Handle]:
        clock = RealClock(self.origin)
        devices: dict[str, Device] = {}
        for its, numbers in self.placement.devices.items():
            path = Path(self._locks.name) / f"device-{numbers[0]}"
            devices[its] = LockedDevice(path, clock, timeout_s=self.config.cluster.wait_timeout_s)
        recipe = _recipe(self.config, self.schedule, self.seed, self.placement, queue, clock, devices, paced=True)
        return [runtime.start(role, n, build_simulated, job_role=role, recipe=recipe) for n in range(count)]


def _recipe(
    config: JobConfig,
    schedule: Schedule,
    seed: int,
    placement: Placement,
    queue: TransferQueue,
    clock: Clock,
    devices: Mapping[str, Device],
    **options: Any,
) -> SimulatedRecipe:
    return SimulatedRecipe(
        config=config,
        cost=simulated_cost(config),
        seed=seed,
        transport=schedule.transport,
        order=schedule.order,
        eta=schedule.eta,
        counts={role: len(numbers) for role, numbers in placement.devices.items()},
        shares_device=len(placement.roles_on(placement.devices["rollout"][0])) > 1,
        queue=queue,
        clock=clock,
        devices=devices,
        **options,
    )
