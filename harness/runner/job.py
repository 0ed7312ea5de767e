"""The job as a schedule sees it: thin fronts over role handles that report to a recorder.

They satisfy the protocols of schedules/protocol.py by shape; nothing here knows which schedule calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.protocols import Clock, Span
from harness.roles.actor import TrainReport
from harness.roles.dataflow import partition_name
from harness.runtime.handles import Handle, call_all
from harness.tasks import Task
from harness.transfer_queue import Ragged, TransferQueue
from harness.weight_sync.coordinator import Coordinator


class Observer(Protocol):
    """Hears what happens in a job, as it happens."""

    def admitted(self, rows: Sequence[int], prompt_tokens: int, at: float) -> None: ...

    def doing(self, role: str, what: str) -> None: ...

    def spans(self, spans: Iterable[Span]) -> None: ...

    def trained(self, iteration: int, reports: Sequence[TrainReport]) -> None: ...

    def published(self, version: int, queue_depth: int) -> None: ...


class PromptSource:
    """Numbers the groups and brings their prompts into the queue, batch `i` into partition `train_<i>`."""

    def __init__(
        self,
        task: Task,
        queue: TransferQueue,
        clock: Clock,
        observer: Observer,
        *,
        seed: int,
        batch: int,
        group_size: int,
        iterations: int,
        wait_timeout_s: float,
    ) -> None:
        self.task, self.queue, self.clock, self.observer = task, queue, clock, observer
        self.seed, self.batch, self.group_size = seed, batch, group_size
        self.groups = iterations * batch
        self.wait_timeout_s = wait_timeout_s
        self.next = 0

    async def admit(self, below: int) -> None:
        below = min(below, self.groups)
        while self.next < below:
            iteration = self.next // self.batch
            if self.next % self.batch == 0:
                await self._create(iteration)
            end = min(below, (iteration + 1) * self.batch)
            await self._put(partition_name(iteration), range(self.next, end))
            self.next = end
            if self.next == self.groups:
                await self.queue.close()

    async def _create(self, iteration: int) -> None:
        first = iteration * self.batch * self.group_size
        rows = range(first, first + self.batch * self.group_size)
        await self.queue.create_partition(
            partition_name(iteration), rows, self.group_size, timeout_s=self.wait_timeout_s
        )

    async def _put(self, partition: str, groups: range) -> None:
        n, now = self.group_size, self.clock.now()
        rows = range(groups.start * n, groups.stop * n)
        problems = [self.task.problem(group, self.seed) for group in groups]
        for group, problem in zip(groups, problems, strict=True):
            self.observer.admitted(range(group * n, (group + 1) * n), len(problem.prompt), now)
        await self.queue.put(
            partition,
            rows,
            {
                "prompt": Ragged.from_rows([problem.prompt for problem in problems for _ in range(n)]),
                "answer": Ragged.from_rows([problem.answer for problem in problems for _ in range(n)]),
                "admitted_at": np.full(len(rows), now),
            },
        )


class RolloutPool:
    """All rollout engines."""

    def __init__(self, engines: Sequence[Handle], observer: Observer) -> None:
        self.engines, self.observer = engines, observer

    async def generate(self, iteration: int) -> None:
        self.observer.doing("rollout", f"batch {iteration}")
        for spans in await call_all(self.engines, "generate", iteration):
            self.observer.spans(spans)
        self.observer.doing("rollout", "off the device")

    async def stream(self) -> None:
        for spans in await call_all(self.engines, "stream"):
            self.observer.spans(spans)
        self.observer.doing("rollout", "done")

    async def allow(self, below: int) -> None:
        self.observer.doing("rollout", f"up to group {below - 1}")
        await call_all(self.engines, "allow", below)

    async def pause(self, *, drain: bool) -> None:
        self.observer.doing("rollout", "draining" if drain else "paused for weights")
        await call_all(self.engines, "pause", drain)

    async def resume(self, below: int) -> None:
        await call_all(self.engines, "resume", below)
        self.observer.doing("rollout", f"up to group {below - 1}")


class StagePool:
    """All workers of one role between rollout and training."""

    def __init__(self, name: str, workers: Sequence[Handle], observer: Observer) -> None:
        self.name, self.workers, self.observer = name, workers, observer

    async def process(self, iteration: int) -> None:
        self.observer.doing(self.name, f"batch {iteration}")
        for spans in await call_all(self.workers, "process", iteration):
            self.observer.spans(spans)
        self.observer.doing(self.name, "waiting")


class TrainerPool:
    """The training world."""

    def __init__(self, ranks: Sequence[Handle], observer: Observer) -> None:
        self.ranks, self.observer = ranks, observer

    async def train(self, iteration: int) -> None:
        self.observer.doing("actor", f"batch {iteration}")
        reports: list[TrainReport] = await call_all(self.ranks, "train", iteration)
        self.observer.trained(iteration, reports)
        self.observer.doing("actor", "waiting")


class PublishedWeights:
    """The coordinator, made known. While weights travel, the queue forgets the batch that they learnt from."""

    def __init__(self, coordinator: Coordinator, queue: TransferQueue, observer: Observer) -> None:
        self.coordinator, self.queue, self.observer = coordinator, queue, observer

    async def publish(self, version: int) -> None:
        self.observer.doing("actor", f"publishing version {version}")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.coordinator.publish(version))
            told = tasks.create_task(self.queue.describe())
            tasks.create_task(self.queue.clear(partition_name(version - 1)))
        self.observer.published(version, told.result()["depth_samples"])
        self.observer.doing("actor", "waiting")


@dataclass(frozen=True)
class RunningJob:
    """`schedules.protocol.Job`."""

    iterations: int
    batch: int
    prompts: PromptSource
    rollout: RolloutPool
    device_stages: Sequence[StagePool]
    host_stages: Sequence[StagePool]
    trainer: TrainerPool
    weights: PublishedWeights
