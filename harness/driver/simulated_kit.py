"""Simulated workers: the same roles around engines that let time pass, in this process or in processes of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engines.simulated.devices import Device, LockedDevice, SharedDevice
from harness.config import CostConfig, JobConfig
from harness.config.placement import Placement
from harness.cost_model.cost import transfer_times
from harness.cost_model.job_cost import simulated_cost
from harness.driver.build_simulated import SimulatedRecipe, build_simulated
from harness.protocols import Clock
from harness.runtime.runtime import Handle, RealClock, Runtime
from harness.tasks import Task
from harness.tasks.task import SimulatedTask
from harness.transfer_queue import TransferQueue
from harness.weight_sync.simulated import SimulatedTransport
from harness.weight_sync.transports import GroupTransport, WeightTransport
from schedules import Schedule


@dataclass
class _SimulatedKit:
    """What both kits share: `harness.driver.assemble.Kit`, save the transport and how workers get their devices."""

    config: JobConfig
    schedule: Schedule
    seed: int
    placement: Placement

    @property
    def task(self) -> Task:
        return SimulatedTask(self.config.cost.prompt_tokens, self.config.cost.lengths.cap)

    @cached_property
    def cost(self) -> CostConfig:
        return simulated_cost(self.config, self.placement)

    def workers(self, role: str, devices: int) -> int:
        return devices // self.config.engine.tensor_parallel if role == "rollout" else 1

    def _start(
        self,
        role: str,
        count: int,
        runtime: Runtime,
        queue: TransferQueue,
        *,
        clock: Clock,
        devices: Mapping[str, Device],
        paced: bool,
    ) -> list[Handle]:
        recipe = SimulatedRecipe(
            config=self.config,
            cost=self.cost,
            seed=self.seed,
            transport=self.schedule.transport,
            order=self.schedule.order,
            eta=self.schedule.eta,
            counts={role: self._count(role) for role in self.placement.devices},
            shares_device=len(self.placement.roles_on(self.placement.devices["rollout"][0])) > 1,
            queue=queue,
            clock=clock,
            devices=devices,
            paced=paced,
        )
        return [runtime.start(role, n, build_simulated, job_role=role, recipe=recipe) for n in range(count)]

    def _count(self, role: str) -> int:
        """Rollout engines, or data-parallel ranks of a role that one worker stands for."""
        training, devices = self.config.training, len(self.placement.devices[role])
        if role == "rollout":
            return self.workers(role, devices)
        return devices // (training.tensor_parallel * training.pipeline_parallel)


@dataclass
class VirtualKit(_SimulatedKit):
    """For one process on a clock that jumps."""

    clock: Clock

    @cached_property
    def transport(self) -> WeightTransport:
        transport = self.schedule.transport
        return SimulatedTransport(transport, transfer_times(self.cost, transport), self.clock)

    @property
    def wait_timeout_s(self) -> float | None:
        return None

    @cached_property
    def devices(self) -> Mapping[str, Device]:
        """The devices of each role; roles of one pool have the same."""
        pools = {devices: SharedDevice(self.clock) for devices in self.placement.devices.values()}
        return {role: pools[devices] for role, devices in self.placement.devices.items()}

    def start(self, role: str, count: int, runtime: Runtime, queue: TransferQueue) -> list[Handle]:
        return self._start(role, count, runtime, queue, clock=self.clock, devices=self.devices, paced=False)


@dataclass
class PacedKit(_SimulatedKit):
    """For processes of their own: their queue and their weight transfers are real."""

    host: str
    origin: float

    def __post_init__(self) -> None:
        self._locks = tempfile.TemporaryDirectory(prefix="cadence-devices-")  # gone when this is

    @property
    def transport(self) -> WeightTransport:
        return GroupTransport(self.schedule.transport, self.host, self.config.cluster.wait_timeout_s)

    @property
    def wait_timeout_s(self) -> float | None:
        return self.config.cluster.wait_timeout_s

    def start(self, role: str, count: int, runtime: Runtime, queue: TransferQueue) -> list[Handle]:
        clock, timeout_s = RealClock(self.origin), self.config.cluster.wait_timeout_s
        devices: dict[str, Device] = {
            its: LockedDevice(Path(self._locks.name) / f"device-{numbers[0]}", clock, timeout_s=timeout_s)
            for its, numbers in self.placement.devices.items()
        }
        return self._start(role, count, runtime, queue, clock=clock, devices=devices, paced=True)
