"""The source of prompts: groups are numbered, and brought into the queue as far as a schedule admits them."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from harness.config.job import DEALT_AGAIN
from harness.driver.checkpoint_files import PartitionRange, PromptState, Refusal
from harness.driver.places import Places, place_of
from harness.driver.recorder import Recorder
from harness.protocols import Clock
from harness.tasks import Dealer, Problem
from harness.transfer_queue import Column, Ragged, TransferQueue
from harness.transfer_queue.rows.columns import taken
from harness.transfer_queue.snapshots.snapshot import SavedRows, saved_rows
from harness.workers.dataflow import ROLLOUT_COLUMNS, Numbering, partition_name, text_column
from harness.workers.training import TrainReport

_CONSUMER = "restored"


@dataclass(frozen=True)
class Finished:
    """bounds: of the rows that an engine may have been given under each of these dispatch limits (rows), the lowest
    first; None where it does not matter when they were begun."""

    rows: np.ndarray
    columns: Mapping[str, Column]
    bounds: np.ndarray | None

    @property
    def newest(self) -> float:
        """Time at which the last of them was finished."""
        finished_at = self.columns["finished_at"]
        assert isinstance(finished_at, np.ndarray), "a number each"
        return float(finished_at.max())


def finished_rows(
    queue: Path,
    groups: Collection[int],
    group_size: int,
    limit_of: Callable[[int], int] | None,
    first_sample: Callable[[int], int] | None = None,
    written: Sequence[str] = tuple(ROLLOUT_COLUMNS),
) -> dict[str, Finished]:
    """Finished rows of these groups, by partition. limit_of: the dispatch limit (groups) of a version, where training
    follows the order of completion; a sample was begun by the version of its first token. first_sample: that a group's
    rows are to hold, where they may hold others; written: the columns of rollout."""
    found, wanted = {}, np.fromiter(groups, np.int64, len(groups))
    told = () if first_sample is None else ("sample",)
    for saved in saved_rows(queue, (*written, *told)):
        there = np.isin(saved.rows // group_size, wanted)
        if first_sample is not None:
            there &= saved.columns["sample"] == _samples(saved.rows, group_size, first_sample)
        kept = np.flatnonzero(there)
        if kept.size:
            columns = {name: taken(saved.columns[name], kept) for name in written}
            bounds = None if limit_of is None else _bounds(saved, kept, group_size, limit_of)
            found[saved.partition] = Finished(saved.rows[kept], columns, bounds)
    return found


def _samples(rows: np.ndarray, group_size: int, first_sample: Callable[[int], int]) -> np.ndarray:
    return np.array([first_sample(row // group_size) + row % group_size for row in rows.tolist()], np.int64)


def _bounds(saved: SavedRows, kept: np.ndarray, group_size: int, limit_of: Callable[[int], int]) -> np.ndarray:
    versions = saved.columns["versions"]
    assert isinstance(versions, Ragged)
    first = versions.values[versions.offsets[:-1]][kept]
    return np.array([limit_of(int(version)) * group_size for version in first], np.int64)


async def put_finished(queue: TransferQueue, partition: str, rows: int, finished: Finished) -> None:
    """rows: of the partition that have a prompt, all of which nobody has been given yet."""
    if finished.bounds is None:
        await _put(queue, partition, rows, finished, np.arange(finished.rows.size))
        return
    for bound in np.unique(finished.bounds):
        of_bound = np.flatnonzero((finished.bounds == bound) & (finished.rows < bound))
        await queue.set_bound("rollout", _CONSUMER, int(bound))
        await _put(queue, partition, rows, finished, of_bound)


async def _put(queue: TransferQueue, partition: str, rows: int, finished: Finished, these: np.ndarray) -> None:
    """Take all that there is, write what is finished, and leave the rest to others."""
    if not these.size:
        return
    await queue.get("rollout", rows, minimum=1, partition=partition, consumer=_CONSUMER)
    columns = {name: taken(column, these) for name, column in finished.columns.items()}
    await queue.put(partition, finished.rows[these], columns)
    await queue.release(_CONSUMER)


class RecordedDrops:
    """The groups that a recorded run dropped, taken out in its order. by_iteration: the groups of each call of
    `Prompts.drop` that dropped some."""

    def __init__(self, queue: TransferQueue, by_iteration: Sequence[Sequence[Sequence[int]]], group_size: int) -> None:
        self._queue, self._group_size = queue, group_size
        self._drops = [list(of_iteration) for of_iteration in by_iteration]
        self._iteration = 0  # that is trained next
        self._leaving: set[asyncio.Task[None]] = set()

    def trained(self) -> None:
        """The next iteration begins."""
        self._iteration += 1

    def take_out(self) -> Sequence[int]:
        """The groups of the next call."""
        drops = self._drops[self._iteration]
        groups = drops.pop(0) if drops else []
        self._leaving |= {asyncio.create_task(self._take(group), name="prompts.drop") for group in groups}
        return groups

    async def _take(self, group: int) -> None:
        """Take a group in place of the actor: as it was recorded, it need not have been started yet."""
        rows = tuple(range(group * self._group_size, (group + 1) * self._group_size))
        await self._queue.get("actor", self._group_size, only=rows, consumer="dropped")

    async def ended(self) -> None:
        """Wait until all of them are out."""
        await asyncio.gather(*self._leaving)


class PromptSource:
    """Numbers the groups and brings their prompts into the queue, batch `i` into partition `train_<i>`.

    What is admitted in place of dropped groups gets partitions of its own after those of the batches. Where groups may
    be refused, `places` knows how often a place was dealt another prompt (harness/driver/filtering.py). Sixteen
    attributes: seven parts that it works with, and the numbers that a checkpoint brings back in one step.
    """

    def __init__(
        self,
        dealer: Dealer,
        queue: TransferQueue,
        clock: Clock,
        observer: Recorder,
        *,
        numbering: Numbering,
        group_size: int,
        iterations: int,
        places: Places | None = None,
        drops: RecordedDrops | None = None,
        keep: Callable[[list[int]], Awaitable[None]] | None = None,
    ) -> None:
        """drops: of a recorded run; here they are dropped as well. keep: as `RecordRole.keep`."""
        self.dealer, self.queue, self.clock, self.observer = dealer, queue, clock, observer
        self.numbering, self.group_size = numbering, group_size
        self.planned = self.groups = iterations * self.batch
        self.next = 0
        self.deciding = asyncio.Lock()
        """Held by whoever decides what becomes of a group: that it is refused, or dropped."""
        self._places, self._recorded, self._keep = places, drops, keep
        self._ranges: list[tuple[int, int]] = []  # of each partition: its first group, and the next one's
        self._drops: list[int] = []  # what each call of `drop` returned
        self._again: deque[int] = deque()  # of those the ones that are to be returned again

    async def admit(self, below: int) -> None:
        below = min(self.numbering.of(below), self.groups)
        while self.next < below:
            if self.next == self._end:
                await self._create(below)
            await asyncio.sleep(0)  # what else was asked for leaves before the prompts are made
            groups = range(self.next, min(below, self._end))
            problems = [self._problem(group) for group in groups]
            self.next = groups.stop  # in one step with what the observer is told: a checkpoint has both or neither
            await self._put(partition_name(len(self._ranges) - 1), groups, problems)

    async def drop(self, started_below: int) -> int:
        async with self.deciding:
            if self._again:
                return self._again.popleft()
            groups = await self._take_out(started_below)
            if groups:
                n = self.group_size
                self.observer.dropped([self.first_sample(group) + k for group in groups for k in range(n)], "stale")
                for group in groups:
                    self.dealer.forget(self.first_sample(group))
                if self._places is not None:
                    self._places.stale(groups)
            self.groups += len(groups)
            self._drops.append(len(groups))
            return len(groups)

    async def _take_out(self, started_below: int) -> Sequence[int]:
        """Take groups out of what the actor is to train, that were started under this limit, now or in a recorded
        run."""
        if self._recorded is not None:
            return self._recorded.take_out()
        n = self.group_size
        rows = await self.queue.drop("actor", started="rollout", below=started_below * n)
        return sorted({row // n for row in rows})

    async def keep(self, groups: Sequence[int]) -> None:
        """Keep what was said in groups that are refused, while it can be read."""
        if self._keep is not None and groups:
            await self._keep(list(groups))

    async def close(self) -> None:
        if self._recorded is not None:
            await self._recorded.ended()
        await self.queue.close()

    def trained(self, reports: Sequence[TrainReport]) -> None:
        """Tell whoever deals problems the rewards. A group is trained whole, by one rank."""
        if self._recorded is not None:
            self._recorded.trained()
        if self.dealer.buffer is None:
            return
        n = self.group_size
        baselines = {sample: reward for report in reports for sample, reward in report.baselines.items()}
        for rows in (rows for report in reports for rows in report.trained):
            told = zip(rows.samples.tolist(), rows.rewards.tolist(), strict=True)
            for first, group in groupby(told, key=lambda one: one[0] - one[0] % n):
                compared = [baselines[first]] if first in baselines else []
                self.dealer.record_rewards(first, [*compared, *(reward for _, reward in group)])

    def refuse(self, refusal: Refusal) -> None:
        """Tell whoever observes and deals of a group that is refused."""
        assert self._places is not None, "only places are refused"
        first = self.first_sample(refusal.place)
        self.dealer.record_rewards(first, [math.nan if reward is None else reward for reward in refusal.rewards])
        self.observer.dropped(range(first, first + self.group_size), refusal.reason, refusal.rewards)
        self._places.note(refusal)

    def deal_again(self, refusal: Refusal) -> Problem:
        """Refuse a group, and give its place the next problem. In one step, so that a place in flight is always in the
        ledger."""
        self.refuse(refusal)
        assert self._places is not None
        self._places.deal_again(refusal.place)
        problem = self._problem(refusal.place)
        self._tell_admitted(refusal.place, problem, refusal.at)
        return problem

    def leave(self, groups: Sequence[int]) -> None:
        """Give groups up that were not needed."""
        for first in map(self.first_sample, groups):
            self.observer.dropped(range(first, first + self.group_size), "spare")
            self.dealer.forget(first)

    def state(self, in_flight: Collection[int]) -> PromptState:
        """in_flight: groups that are neither trained nor dropped; a stale place is not, so that none of those is in
        it."""
        places = {place_of(group) for group in in_flight}
        live = [
            PartitionRange(number, first, end)
            for number, (first, end) in enumerate(self._ranges)
            if end > self.next or any(group in places for group in range(first, end))
        ]
        numbers = [part.number for part in live]
        refilled = None if self._places is None else self._places.state(places, numbers)
        made, dealer = len(self._ranges), self.dealer.state()
        return PromptState(self.next, self.groups, list(self._drops), made, self._end, live, refilled, dealer)

    def refused_since(self) -> list[Refusal]:
        """Refusals by a filter since `state` was asked for."""
        return [] if self._places is None else self._places.noted_since()

    def recall(
        self, state: PromptState, admitted: Mapping[int, float], refused: Sequence[Refusal]
    ) -> Mapping[int, float]:
        """Go on from what `state` and `refused_since` gave: refuse once more what was refused since, as some of it was
        sampled by versions that are gone. admitted: groups that were in flight, and when each was; returns the same of
        places."""
        self.next, self.groups, self._drops = state.next, state.groups, list(state.drops)
        self._again = deque(state.drops)
        self._ranges = [(state.end, state.end)] * state.made  # but for those that are not done with
        for part in state.partitions:
            self._ranges[part.number] = (part.first, part.end)
        if state.dealer is not None:
            self.dealer.load(state.dealer)
        if self._places is None:
            return admitted
        assert state.refilled is not None, "the job has a filter"
        self._places.load(state.refilled, {part.number: part.first for part in state.partitions})
        of_places = {place_of(group): at for group, at in admitted.items()}
        for refusal in refused:
            if refusal.place not in of_places:
                continue  # it was admitted later, and will be again
            self._places.refused_once_more(refusal)
            if refusal.replaced:
                self.refuse(refusal)
                del of_places[refusal.place]
            else:
                self.deal_again(refusal)
                of_places[refusal.place] = refusal.at
        return of_places

    async def restore(
        self, partitions: Sequence[PartitionRange], admitted: Mapping[int, float], finished: Mapping[str, Finished]
    ) -> None:
        """Bring into an empty queue, after `recall`, the partitions that were not done with, of groups that were in
        flight or are still to be admitted. admitted: as `recall` says; finished: by partition, rows that rollout need
        not make again."""
        for part in partitions:
            name = partition_name(part.number)
            groups = [group for group in range(part.first, part.end) if group in admitted or group >= self.next]
            await self.queue.create_partition(name, self.rows(groups), self.group_size)
            there = [group for group in groups if group in admitted]
            if there:
                problems = [self._problem(group) for group in there]
                await self.write(name, there, problems, [admitted[group] for group in there])
            if name in finished:
                await put_finished(self.queue, name, len(there) * self.group_size, finished[name])

    @property
    def batch(self) -> int:
        """Groups that are admitted with each batch, spares included."""
        return self.numbering.batch + self.numbering.spares

    @property
    def _end(self) -> int:
        """Number after the last group of the newest partition."""
        return self._ranges[-1][1] if self._ranges else 0

    async def _create(self, below: int) -> None:
        """Make a partition from the next group on: its batch, or, past the last batch, only what is admitted right now,
        since more may be dropped later, and a partition has to be filled to come to its end."""
        n, end = self.group_size, self.next + self.batch
        if self.next >= self.planned:
            end = min(end, below)
        name, rows = partition_name(len(self._ranges)), range(self.next * n, end * n)
        if self._places is not None:
            self._places.made(len(self._ranges), self.next, end - self.next)
        self._ranges.append((self.next, end))
        await self.queue.create_partition(name, rows, n)

    async def _put(self, partition: str, groups: Sequence[int], problems: Sequence[Problem]) -> None:
        now = self.clock.now()
        for group, problem in zip(groups, problems, strict=True):
            self._tell_admitted(group, problem, now)
        await self.write(partition, groups, problems, [now] * len(groups))

    def _tell_admitted(self, group: int, problem: Problem, at: float) -> None:
        first = self.first_sample(group)
        self.observer.admitted(range(first, first + self.group_size), problem, at)

    async def write(
        self, partition: str, groups: Sequence[int], problems: Sequence[Problem], at: Sequence[float]
    ) -> None:
        """Write problems into a partition. at: when each group was admitted."""
        admitted_at = np.repeat(np.asarray(at, np.float64), self.group_size)
        await self.queue.put(
            partition, self.rows(groups), self._columns(groups, problems) | {"admitted_at": admitted_at}
        )

    def first_sample(self, group: int) -> int:
        """The id of the first of the samples that this group's rows hold now; the others follow."""
        return (group + self._dealt(group) * DEALT_AGAIN) * self.group_size

    def _problem(self, group: int) -> Problem:
        """The problem of a group; those that are dealt later come after all that are planned."""
        return self.dealer.problem(group + self._dealt(group) * self.planned, self.first_sample(group))

    def _dealt(self, place: int) -> int:
        """Number of prompts besides its first that a place was dealt."""
        return 0 if self._places is None else self._places.dealt.get(place, 0)

    def _columns(self, groups: Sequence[int], problems: Sequence[Problem]) -> dict[str, Column]:
        """Columns of the rows of these groups, a problem for each group."""
        n = self.group_size
        columns: dict[str, Column] = {
            "prompt": Ragged.from_rows([problem.prompt for problem in problems for _ in range(n)]),
            "answer": text_column([problem.answer for problem in problems for _ in range(n)]),
        }
        if self._places is not None:
            columns["sample"] = np.concatenate([np.arange(n) + self.first_sample(group) for group in groups])
        return columns

    def rows(self, groups: Sequence[int]) -> list[int]:
        """Rows of these groups."""
        return [group * self.group_size + k for group in groups for k in range(self.group_size)]
