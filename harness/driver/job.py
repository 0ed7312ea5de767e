"""The job as a schedule sees it: thin fronts over role handles that report to a recorder.

They satisfy the protocols of schedules/protocol.py by shape; nothing here knows which schedule calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.driver.pool import Observer, Pool
from harness.driver.rollout_pool import RolloutPool
from harness.protocols import Clock
from harness.runtime.runtime import Handle, call_all
from harness.tasks import Task
from harness.transfer_queue import Ragged, TransferQueue
from harness.transfer_queue.control.metrics import queue_metrics
from harness.weight_sync.coordinator import Coordinator
from harness.workers.actor import TrainReport, one_report_per_group
from harness.workers.dataflow import partition_name
from schedules.protocol import Rollout


class PromptSource:
    """Numbers the groups and brings their prompts into the queue, batch `i` into partition `train_<i>`.

    What is admitted in place of dropped groups gets partitions of its own after those of the batches.
    """

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
        wait_timeout_s: float | None,
    ) -> None:
        self.task, self.queue, self.clock, self.observer = task, queue, clock, observer
        self.seed, self.batch, self.group_size = seed, batch, group_size
        self.planned = self.groups = iterations * batch
        self.wait_timeout_s = wait_timeout_s
        self.next = 0
        self._partitions = 0
        self._end = 0  # of the newest partition: the first group that is not its own

    async def admit(self, below: int) -> None:
        below = min(below, self.groups)
        while self.next < below:
            if self.next == self._end:
                await self._create(below)
            end = min(below, self._end)
            await self._put(partition_name(self._partitions - 1), range(self.next, end))
            self.next = end

    async def drop(self, started_below: int) -> int:
        rows = await self.queue.drop("actor", started="rollout", below=started_below * self.group_size)
        if rows:
            self.observer.dropped(rows, "stale")
        groups = len(rows) // self.group_size
        self.groups += groups
        return groups

    async def close(self) -> None:
        await self.queue.close()

    async def _create(self, below: int) -> None:
        """A partition from the next group on: its batch, or, past the last batch, only what is admitted right now,
        since nobody knows whether more will be dropped, and a partition has to be filled to come to its end."""
        n, end = self.group_size, self.next + self.batch
        if self.next >= self.planned:
            end = min(end, below)
        rows = range(self.next * n, end * n)
        await self.queue.create_partition(partition_name(self._partitions), rows, n, timeout_s=self.wait_timeout_s)
        self._partitions, self._end = self._partitions + 1, end

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


class StagePool(Pool):
    """All workers of one role between rollout and training."""

    async def process(self, iteration: int) -> None:
        self.observer.doing(self.name, f"batch {iteration}")
        await self._call("process", iteration)
        self.observer.doing(self.name, "waiting")

    async def stream(self) -> None:
        self.observer.doing(self.name, "streaming")
        await self._long(self._call("stream"))
        self.observer.doing(self.name, "done")


class TrainerPool:
    """The training world; `together` neighbouring ranks train on the same micro-batches."""

    def __init__(self, ranks: Sequence[Handle], observer: Observer, together: int = 1) -> None:
        self.ranks, self.observer, self.together = ranks, observer, together

    async def train(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        self.observer.doing("actor", f"batch {iteration}")
        reports: list[TrainReport] = await call_all(self.ranks, "train", iteration, first)
        self.observer.trained(iteration, one_report_per_group(reports, self.together))
        self.observer.doing("actor", "waiting")


class PublishedWeights:
    """The coordinator, made known. While weights travel, the queue forgets the samples that they learnt from, and
    `pools` hand in what they did in the iteration that is closed with it."""

    def __init__(
        self, coordinator: Coordinator, queue: TransferQueue, observer: Observer, pools: Sequence[Pool]
    ) -> None:
        self.coordinator, self.queue, self.observer, self.pools = coordinator, queue, observer, pools

    async def publish(self, version: int) -> None:
        await self._close(version, "publishing", self.coordinator.publish(version))

    async def start_transfer(self, version: int) -> None:
        await self._close(version, "handing over", self.coordinator.start_transfer(version))

    async def mark_version(self, version: int) -> None:
        """The trained weights are called `version` now, and go to no engine."""
        await self._close(version, "marking")

    async def wait_arrived(self, version: int) -> None:
        await self.coordinator.wait_arrived(version)
        self.observer.doing("weights", f"version {version} arrived")

    async def swap(self, rollout: Rollout, version: int) -> None:
        assert isinstance(rollout, RolloutPool)
        self.observer.doing(rollout.name, f"loading version {version}")
        await self.coordinator.wait_arrived(version)  # until then engines may come and go
        await self.coordinator.swap(rollout.workers, version)
        self.observer.doing(rollout.name, f"at version {version}")

    async def _close(self, version: int, what: str, *transfer: Coroutine[Any, Any, None]) -> None:
        """Ends the iteration that made `version`, when its transfer has got as far as the trainer has to wait."""
        self.observer.doing("actor", f"{what} version {version}")
        for pool in self.pools:
            pool.ask_spans()
        async with asyncio.TaskGroup() as tasks:
            for part in transfer:
                tasks.create_task(part)
            told = tasks.create_task(self.queue.describe())
            tasks.create_task(self.queue.clear_finished())
        self.observer.published(version, queue_metrics(told.result()))
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

    @property
    def stages(self) -> Sequence[StagePool]:
        return (*self.host_stages, *self.device_stages)
