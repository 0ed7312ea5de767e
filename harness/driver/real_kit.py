"""Real workers: engines that compute, on the devices of a placement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from engines import ENGINES
from harness.config import JobConfig, ModelConfig
from harness.config.placement import Placement
from harness.driver.build import (
    Recipe,
    build_actor,
    build_actor_fwd,
    build_advantages,
    build_reference,
    build_reward,
    build_rollout,
)
from harness.runtime.runtime import Handle, Runtime
from harness.tasks import Task, make_task
from harness.transfer_queue import TransferQueue
from harness.weight_sync.transports import GroupTransport, WeightTransport
from schedules import Schedule

_BUILD: dict[str, Callable[..., Any]] = {
    "reference": build_reference,
    "actor_fwd": build_actor_fwd,
    "reward": build_reward,
    "advantages": build_advantages,
}


@dataclass
class RealKit:
    """`harness.driver.assemble.Kit`. model: the checkpoint of the initial weights."""

    config: JobConfig
    schedule: Schedule
    model: ModelConfig
    seed: int
    placement: Placement
    gpu: bool
    host: str
    origin: float

    def __post_init__(self) -> None:
        self._stores: list[TCPStore] = []  # where training ranks meet; they have to outlive them

    @property
    def task(self) -> Task:
        return make_task(self.config)

    @property
    def transport(self) -> WeightTransport:
        return GroupTransport(self.schedule.transport, self.host, self.config.cluster.wait_timeout_s)

    @property
    def wait_timeout_s(self) -> float | None:
        return self.config.cluster.wait_timeout_s

    def workers(self, role: str, devices: int) -> int:
        return devices

    def start(self, role: str, count: int, runtime: Runtime, queue: TransferQueue) -> list[Handle]:
        recipe = Recipe(
            config=self.config,
            model=self.model,
            seed=self.seed,
            engine=ENGINES[self.config.engine.name],
            device="cuda" if self.gpu else "cpu",
            queue=queue,
            origin=self.origin,
            order=self.schedule.order,
            eta=self.schedule.eta,
        )
        if role == "actor":
            return self._start_trainers(count, runtime, recipe)
        if role == "rollout":
            shares = len(self.placement.roles_on(self.placement.devices[role][0])) > 1
            options = {"recipe": recipe, "engines": count, "shares_device": shares}
            return [runtime.start(role, n, build_rollout, **options) for n in range(count)]
        return [runtime.start(role, n, _BUILD[role], recipe=recipe) for n in range(count)]

    def _start_trainers(self, world: int, runtime: Runtime, recipe: Recipe) -> list[Handle]:
        """The store lives in this process, so that no rank has to be up before the others can be told where to meet."""
        timeout = timedelta(seconds=self.config.cluster.wait_timeout_s)
        store = TCPStore(self.host, 0, world, True, timeout, wait_for_workers=False)
        self._stores.append(store)
        meet = {"world": world, "host": self.host, "port": store.port}
        return [runtime.start("actor", rank, build_actor, recipe=recipe, **meet) for rank in range(world)]
