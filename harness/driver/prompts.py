"""The source of prompts: groups are numbered, and brought into the queue as far as a schedule admits them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

import numpy as np

from harness.driver.checkpoint_files import PartitionRange, PromptState, Refusal
from harness.driver.finished_rows import Finished, put_finished
from harness.driver.observer import Observer
from harness.protocols import Clock
from harness.tasks import DataBuffer, Dealer, Problem, Task
from harness.transfer_queue import Column, Ragged, TransferQueue
from harness.workers.computing_role import abandon
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
        drops: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """drops: of a recorded run by iteration, the groups of each call of `drop` that dropped some: here they are
        dropped as well."""
        self.dealer = Dealer(task, seed, buffer)
        self.task, self.queue, self.clock, self.observer = task, queue, clock, observer
        self.seed, self.batch, self.group_size = seed, batch, group_size
        self.planned = self.groups = iterations * batch
        self.next = 0
        self._iteration = 0  # that is trained next
        self._recorded_drops = None if drops is None else [list(of_iteration) for of_iteration in drops]
        self._leaving: set[asyncio.Task[None]] = set()  # in a replay: who takes out what is dropped
        self._ranges: list[tuple[int, int]] = []  # of each partition: its first group, and the next one's
        self._drops: list[int] = []  # what each call of `drop` returned
        self._again: deque[int] = deque()  # of those the ones that are to be returned again

    async def admit(self, below: int) -> None:
        below = min(below, self.groups)
        while self.next < below:
            creating = self._create(below) if self.next == self._end else None
            groups = range(self.next, min(below, self._end))
            try:
                await asyncio.sleep(0)  # it leaves before the prompts are made
                problems = [self._problem(group) for group in groups]
                if creating is not None:
                    await creating
            except BaseException:
                if creating is not None:
                    abandon(creating)
                raise
            self.next = groups.stop  # in one step with what the observer is told: a checkpoint has both or neither
            await self._put(partition_name(len(self._ranges) - 1), groups, problems)

    async def drop(self, started_below: int) -> int:
        if self._again:
            return self._again.popleft()
        groups = await self._take_out(started_below)
        if groups:
            n = self.group_size
            self.observer.dropped([self.first_sample(group) + k for group in groups for k in range(n)], "stale")
            for group in groups:
                self.dealer.forget(self.first_sample(group))
            self._now_stale(groups)
        self.groups += len(groups)
        self._drops.append(len(groups))
        return len(groups)

    async def _take_out(self, started_below: int) -> Sequence[int]:
        """Take groups out of what the actor is to train, that were started under this limit, now or in a recorded
        run."""
        n = self.group_size
        if self._recorded_drops is None:
            rows = await self.queue.drop("actor", started="rollout", below=started_below * n)
            return sorted({row // n for row in rows})
        drops = self._recorded_drops[self._iteration]
        groups = drops.pop(0) if drops else []
        self._leaving |= {asyncio.create_task(self._take(group), name="prompts.drop") for group in groups}
        return groups

    async def _take(self, group: int) -> None:
        """Take a group in place of the actor: as it was recorded, it need not have been started yet."""
        await self.queue.get("actor", self.group_size, only=tuple(self._rows([group])), consumer="dropped")

    async def close(self) -> None:
        await asyncio.gather(*self._leaving)
        await self.queue.close()

    def trained(self, reports: Sequence[TrainReport]) -> None:
        """Tell whoever deals problems the rewards. A group is trained whole, by one rank."""
        self._iteration += 1
        if self.dealer.buffer is None:
            return
        n = self.group_size
        baselines = {sample: reward for report in reports for sample, reward in report.baselines.items()}
        for rows in (rows for report in reports for rows in report.trained):
            told = zip(rows.rows.tolist(), rows.reward.tolist(), strict=True)
            for first, group in groupby(told, key=lambda one: one[0] - one[0] % n):
                compared = [baselines[first]] if first in baselines else []
                self.dealer.record_rewards(first, [*compared, *(reward for _, reward in group)])

    def state(self, in_flight: Collection[int]) -> PromptState:
        """in_flight: groups that are neither trained nor dropped."""
        live = [
            PartitionRange(number, first, end)
            for number, (first, end) in enumerate(self._ranges)
            if end > self.next or any(group in in_flight for group in range(first, end))
        ]
        made, dealer = len(self._ranges), self.dealer.state()
        return PromptState(self.next, self.groups, list(self._drops), made, self._end, live, dealer=dealer)

    def refused_since(self) -> list[Refusal]:
        """Refusals by a filter since `state` was asked for."""
        return []

    def recall(
        self, state: PromptState, admitted: Mapping[int, float], refused: Sequence[Refusal]
    ) -> Mapping[int, float]:
        """Go on from what `state` and `refused_since` gave. admitted: groups that were in flight, and when each was;
        returns the same of the rows' groups."""
        self.next, self.groups, self._drops = state.next, state.groups, list(state.drops)
        self._again = deque(state.drops)
        self._ranges = [(state.end, state.end)] * state.made  # but for those that are not done with
        for part in state.partitions:
            self._ranges[part.number] = (part.first, part.end)
        if state.dealer is not None:
            self.dealer.load(state.dealer)
        return admitted

    async def restore(
        self, partitions: Sequence[PartitionRange], admitted: Mapping[int, float], finished: Mapping[str, Finished]
    ) -> None:
        """Bring into an empty queue, after `recall`, the partitions that were not done with, of groups that were in
        flight or are still to be admitted. admitted: as `recall` says; finished: by partition, rows that rollout need
        not make again."""
        for part in partitions:
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
        """Number after the last group of the newest partition."""
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
            self._tell_admitted(group, problem, now)
        await self._write(partition, groups, problems, [now] * len(groups))

    def _tell_admitted(self, group: int, problem: Problem, at: float) -> None:
        first = self.first_sample(group)
        self.observer.admitted(range(first, first + self.group_size), len(problem.prompt), at)

    async def _write(
        self, partition: str, groups: Sequence[int], problems: Sequence[Problem], at: Sequence[float]
    ) -> None:
        """Write problems into a partition. at: when each group was admitted."""
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
        """Columns of the rows of these groups, a problem for each group."""
        n = self.group_size
        return {
            "prompt": Ragged.from_rows([problem.prompt for problem in problems for _ in range(n)]),
            "answer": text_column([problem.answer for problem in problems for _ in range(n)]),
        }

    def _rows(self, groups: Sequence[int]) -> list[int]:
        return [group * self.group_size + k for group in groups for k in range(self.group_size)]

    def _now_stale(self, groups: Sequence[int]) -> None:
        """Note that these groups will not be trained."""

    def _new_partition(self, name: str, groups: int) -> None:
        """One is made, of so many groups."""
