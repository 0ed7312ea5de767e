"""Where prompts come from: groups are numbered, and brought into the queue as far as a schedule admits them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from harness.driver.checkpoint_files import PartitionRange, PromptState
from harness.driver.finished_rows import Finished, put_finished
from harness.driver.observer import Observer
from harness.protocols import Clock
from harness.tasks import DataBuffer, Dealer, Problem, Task
from harness.transfer_queue import Column, Ragged, TransferQueue
from harness.workers.dataflow import partition_name, text_column
from harness.workers.training import TrainReport


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
        buffer: DataBuffer | None = None,
    ) -> None:
        self.dealer = Dealer(task, seed, buffer)
        self.task, self.queue, self.clock, self.observer = task, queue, clock, observer
        self.seed, self.batch, self.group_size = seed, batch, group_size
        self.planned = self.groups = iterations * batch
        self.next = 0
        self._ranges: list[tuple[int, int]] = []  # of each partition: its first group, and the next one's
        self._drops: list[int] = []  # what each call of `drop` returned
        self._replayed: deque[int] = deque()  # of those the ones that are to be returned again

    async def admit(self, below: int) -> None:
        below = min(below, self.groups)
        while self.next < below:
            creating = self._create(below) if self.next == self._end else None
            await asyncio.sleep(0)  # it leaves before the prompts are made
            groups = range(self.next, min(below, self._end))
            try:
                problems = [self._problem(group) for group in groups]
            except BaseException:
                if creating is not None:
                    creating.cancel()
                raise
            if creating is not None:
                await creating
            await self._put(partition_name(len(self._ranges) - 1), groups, problems)
            self.next = groups.stop

    async def drop(self, started_below: int) -> int:
        if self._replayed:
            return self._replayed.popleft()
        n = self.group_size
        rows = await self.queue.drop("actor", started="rollout", below=started_below * n)
        groups = sorted({row // n for row in rows})
        if groups:
            self.observer.dropped([self.first_sample(group) + k for group in groups for k in range(n)], "stale")
            for group in groups:
                self.dealer.forget(self.first_sample(group))
            self._now_stale(groups)
        self.groups += len(groups)
        self._drops.append(len(groups))
        return len(groups)

    async def close(self) -> None:
        await self.queue.close()

    def trained(self, reports: Sequence[TrainReport]) -> None:
        """Whoever deals problems hears of the rewards. A group is trained whole, by one rank."""
        if self.dealer.buffer is None:
            return
        n = self.group_size
        for rows in (rows for report in reports for rows in report.trained):
            for at in range(0, len(rows.rows), n):
                self.dealer.told(int(rows.rows[at]), rows.reward[at : at + n].tolist())

    def state(self, in_flight: Collection[int]) -> PromptState:
        """in_flight: groups that are neither trained nor dropped."""
        live = [
            PartitionRange(number, first, end)
            for number, (first, end) in enumerate(self._ranges)
            if end > self.next or any(group in in_flight for group in range(first, end))
        ]
        return PromptState(self.next, self.groups, list(self._drops), len(self._ranges), self._end, live)

    async def restore(
        self, state: PromptState, admitted: Mapping[int, float], finished: Mapping[str, Finished]
    ) -> None:
        """Into an empty queue the partitions that were not done with, of groups that were in flight or are still to be
        admitted. admitted: those in flight, and when they were; finished: by partition, rows that rollout need not make
        again."""
        self.next, self.groups, self._drops = state.next, state.groups, list(state.drops)
        self._replayed = deque(state.drops)
        self._ranges = [(state.end, state.end)] * state.made  # but for those below
        for part in state.partitions:
            self._ranges[part.number] = (part.first, part.end)
            name = partition_name(part.number)
            groups = [group for group in range(part.first, part.end) if group in admitted or group >= self.next]
            await self.queue.create_partition(name, self._rows(groups), self.group_size)
            there = [group for group in groups if group in admitted]
            if there:
                problems = [self._problem(group) for group in there]
                await self._write(name, there, problems, [admitted[group] for group in there])
            if name in finished:
                await put_finished(self.queue, name, len(there) * self.group_size, finished[name])

    @property
    def _end(self) -> int:
        """Of the newest partition."""
        return self._ranges[-1][1] if self._ranges else 0

    def _create(self, below: int) -> asyncio.Task[None]:
        """A partition from the next group on: its batch, or, past the last batch, only what is admitted right now,
        since more may be dropped later, and a partition has to be filled to come to its end."""
        n, end = self.group_size, self.next + self.batch
        if self.next >= self.planned:
            end = min(end, below)
        name, rows = partition_name(len(self._ranges)), range(self.next * n, end * n)
        self._new_partition(name, end - self.next)
        self._ranges.append((self.next, end))
        return asyncio.create_task(self.queue.create_partition(name, rows, n), name="prompts.create")

    async def _put(self, partition: str, groups: Sequence[int], problems: Sequence[Problem]) -> None:
        now = self.clock.now()
        for group, problem in zip(groups, problems, strict=True):
            first = self.first_sample(group)
            self.observer.admitted(range(first, first + self.group_size), len(problem.prompt), now)
        await self._write(partition, groups, problems, [now] * len(groups))

    async def _write(
        self, partition: str, groups: Sequence[int], problems: Sequence[Problem], at: Sequence[float]
    ) -> None:
        """at: when each was admitted."""
        admitted_at = np.repeat(np.asarray(at, np.float64), self.group_size)
        await self.queue.put(
            partition, self._rows(groups), self._columns(groups, problems) | {"admitted_at": admitted_at}
        )

    def first_sample(self, group: int) -> int:
        """The id of the first of the samples that this group's rows hold now; the others follow."""
        return group * self.group_size

    def _problem(self, group: int) -> Problem:
        return self.dealer.problem(group, self.first_sample(group))

    def _columns(self, groups: Sequence[int], problems: Sequence[Problem]) -> dict[str, Column]:
        """Of the rows of these groups, a problem for each group."""
        n = self.group_size
        return {
            "prompt": Ragged.from_rows([problem.prompt for problem in problems for _ in range(n)]),
            "answer": text_column([problem.answer for problem in problems for _ in range(n)]),
        }

    def _rows(self, groups: Sequence[int]) -> list[int]:
        return [group * self.group_size + k for group in groups for k in range(self.group_size)]

    def _now_stale(self, groups: Sequence[int]) -> None:
        """These will not be trained."""

    def _new_partition(self, name: str, groups: int) -> None:
        """One is made, of so many groups."""
