"""Dynamic sampling: the place of a group that a filter refuses is dealt another prompt, until its group is kept; so is
that of a group that took too long, where `engine.on_straggler=drop`.

    prompts -- prompt --> rollout --> reward --> filter
       ^  |                                        | passed
       |  +-- kept: to advantages, log-probs, actor|
       +---------------- begin_again --------------+

A place is a group's rows in the queue. It stays in its batch whatever it is dealt, so a schedule, its bounds and the
order of training know nothing of a filter; and which prompt a place is dealt next is decided by the place alone, not by
when it was refused: without staleness every schedule trains the same groups in the same order.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, get_args

import msgspec
import numpy as np

from harness.config import ConfigError, JobConfig
from harness.driver.candidates import Candidates, Decision
from harness.driver.checkpoint_files import PromptState, RefilledPartition, RefilledState, Refusal
from harness.driver.pools import StagePool
from harness.driver.prompts import PromptSource
from harness.metrics.ledger import DropReason
from harness.metrics.samples import DEALT_AGAIN
from harness.protocols import FINISH_REASONS
from harness.tasks import Problem
from harness.transfer_queue import Batch, Column
from harness.workers.dataflow import VERDICTS, Numbering, iteration_of, partition_name

_MOST_DEALS = 1 << 8  # of one place, that ids have room for


@dataclass(frozen=True)
class Refuses:
    """A reason for which groups are refused. setting: that it is of; refuses: of rows that were scored, bool [rows],
    those of groups that it refuses, or one of them; fix: where it refuses too many."""

    drop: DropReason
    setting: str
    fix: str
    refuses: Callable[[Batch], np.ndarray]


def refusals_of(config: JobConfig) -> list[Refuses]:
    """The last of those that refuse a group says what becomes of it."""
    reasons = []
    if config.algorithm.filters:
        setting = f"algorithm.filter={config.algorithm.filter}"
        fix = "give it problems that are neither too easy nor too hard"
        reasons.append(Refuses("filtered", setting, fix, lambda batch: ~batch.dense("passed")))
    if config.engine.on_straggler == "drop":
        setting = f"engine.on_straggler=drop after engine.sample_limit_s={config.engine.sample_limit_s:g}"
        cut = FINISH_REASONS.index("cut")
        fix = "raise engine.sample_limit_s"
        reasons.append(Refuses("straggler", setting, fix, lambda batch: batch.dense("finish_reason") == cut))
    return reasons


class _Verdict(NamedTuple):
    """The verdict on a group. reason: why it is refused, if it is; rewards: of its samples, None for what no file can
    hold."""

    reason: DropReason | None
    rewards: list[float | None]


class RefilledPrompts(PromptSource):
    """Also hears what the filter says of each group, and how its samples ended, and deals again. reasons: for which
    groups are refused here; rounds: how many times a batch may be generated for them; spares: groups that are admitted
    with each batch besides its own, to replace the first that are refused. In the queue they come behind these."""

    def __init__(
        self, *args: Any, reasons: Sequence[Refuses], rounds: int, batch: int, spares: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(*args, batch=batch + spares, **kwargs)
        self._reasons, self._rounds = reasons, rounds
        self._spares, self._numbering = spares, Numbering(batch, spares)
        self._candidates: dict[str, Candidates] = {}  # by partition
        self._judged: dict[int, _Verdict] = {}  # of groups of which nothing is decided yet
        self._unneeded: set[int] = set()  # groups that were given up before they were judged
        self._deals: dict[int, int] = {}  # of places: how often each was dealt another prompt
        self._places = Counter[str]()  # by partition
        self._refused = Counter[str]()
        self._stale: set[int] = set()  # places whose groups will not be trained anyway
        self._deciding = asyncio.Lock()  # what becomes of a group
        self._since: list[Refusal] | None = None  # a checkpoint was begun whose queue is not saved

    async def admit(self, below: int) -> None:
        await super().admit(self._numbering.of(below))

    async def refill(self) -> None:
        """Consumes what is said of groups; produces kept ones, and prompts. Ends when the prompts are closed and every
        group is kept. Raises ConfigError where a batch is generated too often."""
        most, n = self.batch * self.group_size, self.group_size
        while (batch := await self.queue.get(VERDICTS, most, minimum=n, consumer="prompts")) is not None:
            async with self._deciding:
                await self._decide(batch)

    async def drop(self, started_below: int) -> int:
        async with self._deciding:
            return await super().drop(started_below)

    def state(self, in_flight: Collection[int]) -> PromptState:
        """The state with places in flight: a stale one is not, so that none of those is in it."""
        self._since = []
        places = {_place_of(group) for group in in_flight}
        state = super().state(places)
        partitions = [
            RefilledPartition(part.number, self._places[name], self._refused[name], self._decided(name))
            for part in state.partitions
            for name in [partition_name(part.number)]
        ]
        deals = [(place, self._deals[place]) for place in sorted(places & self._deals.keys())]
        return msgspec.structs.replace(state, refilled=RefilledState(deals, partitions))

    def _decided(self, partition: str) -> list[tuple[int, Decision]]:
        of = self._candidates_of(partition).decided
        return [(candidate, decision) for candidate, decision in sorted(of.items()) if decision != "kept"]

    def refused_since(self) -> list[Refusal]:
        since, self._since = self._since, None
        return since or []

    def recall(
        self, state: PromptState, admitted: Mapping[int, float], refused: Sequence[Refusal]
    ) -> Mapping[int, float]:
        """Refuses once more what was refused since `state`: some of it was sampled by versions that are gone."""
        super().recall(state, admitted, refused)
        assert state.refilled is not None, "the job has a filter"
        self._deals = dict(state.refilled.deals)
        for part in state.refilled.partitions:
            name = partition_name(part.number)
            self._places[name], self._refused[name] = part.places, part.refused
            self._candidates[name] = Candidates(part.places, self._spares, part.decided)
        of_places = {_place_of(group): at for group, at in admitted.items()}
        for refusal in refused:
            if refusal.place in of_places:  # others were admitted later, and will be again
                self._refused[partition_name(refusal.partition)] += 1
                if refusal.replaced:
                    self._tell_refused(refusal)
                    del of_places[refusal.place]
                else:
                    self._refuse(refusal)
                    of_places[refusal.place] = refusal.at
                self._remember(refusal)
        return of_places

    def _remember(self, refusal: Refusal) -> None:
        """Take over what was decided of a place when it was first refused."""
        candidates = self._candidates_of(partition_name(refusal.partition))
        candidate = refusal.place - self._ranges[refusal.partition][0]
        if candidate not in candidates.decided:
            candidates.remember(candidate, "refused" if refusal.replaced else "again")

    def _candidates_of(self, partition: str) -> Candidates:
        if partition not in self._candidates:
            self._candidates[partition] = Candidates(self._places[partition], self._spares)
        return self._candidates[partition]

    def first_sample(self, group: int) -> int:
        return (group + self._deals.get(group, 0) * DEALT_AGAIN) * self.group_size

    def _problem(self, group: int) -> Problem:
        """The problem of a group; those that are dealt later come after all that are planned."""
        number = group + self._deals.get(group, 0) * self.planned
        return self.dealer.problem(number, self.first_sample(group))

    def _columns(self, groups: Sequence[int], problems: Sequence[Problem]) -> dict[str, Column]:
        samples = np.concatenate([np.arange(self.group_size) + self.first_sample(group) for group in groups])
        return super()._columns(groups, problems) | {"sample": samples}

    def _now_stale(self, groups: Sequence[int]) -> None:
        self._stale.update(groups)

    def _new_partition(self, name: str, groups: int) -> None:
        self._places[name] = groups - self._spares

    async def _decide(self, batch: Batch) -> None:
        """Decide on a batch. Whoever observes hears of all of it at once, before anybody is handed what is kept."""
        name, now = batch.partition, self.clock.now()
        verdicts = self._verdicts(batch)
        self._judged |= verdicts
        late = list(self._unneeded & verdicts.keys())
        decided = self._decisions(name, verdicts)
        kept, refused, again, spare = (
            [group for group, decision in decided.items() if decision == one] for one in get_args(Decision)
        )
        self._check_rounds(name, again, len(refused))
        made = {group: self._judged.pop(group, None) for group in (*decided, *late)}
        problems = [self._refuse(_refusal(name, group, now, made[group])) for group in again]
        for group in refused:
            self._tell_refused(_refusal(name, group, now, made[group], replaced=True))
        self._leave(spare)
        unjudged = {group for group in spare if made[group] is None}
        self._unneeded = (self._unneeded | unjudged) - set(late)
        if kept:
            await self._settle(name, kept, True)
        if refused or spare:
            await self.queue.give_up(name, self._rows([*refused, *spare]))
        if given_up := [group for group in (*refused, *spare, *late) if group not in unjudged]:
            await self._settle(name, given_up, False)
        if again:
            await self.queue.begin_again(name, self._rows(again))
            await self._write(name, again, problems, [now] * len(again))

    def _verdicts(self, batch: Batch) -> dict[int, _Verdict]:
        """Verdicts by group."""
        n = self.group_size
        groups = (batch.rows[::n] // n).tolist()
        refused: dict[int, DropReason] = {}
        for reason in self._reasons:
            refuses = np.any(reason.refuses(batch).reshape(-1, n), axis=1)
            refused |= {groups[place]: reason.drop for place in np.flatnonzero(refuses).tolist()}
        rewards = batch.dense("reward").reshape(-1, n).tolist()
        return {
            group: _Verdict(refused.get(group), list(map(_number, its)))
            for group, its in zip(groups, rewards, strict=True)
        }

    def _decisions(self, partition: str, verdicts: Mapping[int, _Verdict]) -> dict[int, Decision]:
        """Decisions by group: of those that were judged just now, and of those before of which nothing was certain."""
        first = self._ranges[iteration_of(partition)][0]
        candidates, found = self._candidates_of(partition), dict[int, Decision]()
        for group, verdict in verdicts.items():
            passed = verdict.reason is None
            if group in self._stale:
                found[group] = "kept"  # nobody trains it
            elif group in self._deals:
                found[group] = "kept" if passed else "again"
            elif group not in self._unneeded:
                candidates.judged(group - first, passed)
        found |= {first + candidate: decision for candidate, decision in candidates.decide().items()}
        return dict(sorted(found.items()))

    async def _settle(self, partition: str, groups: Sequence[int], kept: bool) -> None:
        rows = self._rows(groups)
        await self.queue.put(partition, rows, {"kept": np.full(len(rows), kept)})

    def _leave(self, groups: Sequence[int]) -> None:
        """Give groups up that were not needed."""
        for first in map(self.first_sample, groups):
            self.observer.dropped(range(first, first + self.group_size), "spare")
            self.dealer.forget(first)

    def _tell_refused(self, refusal: Refusal) -> None:
        first = self.first_sample(refusal.place)
        self.dealer.record_rewards(first, [math.nan if reward is None else reward for reward in refusal.rewards])
        self.observer.dropped(range(first, first + self.group_size), refusal.reason)
        if self._since is not None:
            self._since.append(refusal)

    def _refuse(self, refusal: Refusal) -> Problem:
        """The next problem of its place. In one step, so that a place in flight is always in the ledger."""
        place = refusal.place
        self._tell_refused(refusal)
        self._deals[place] = self._deals.get(place, 0) + 1
        problem = self._problem(place)
        self._tell_admitted(place, problem, refusal.at)
        return problem

    def _check_rounds(self, partition: str, groups: Sequence[int], replaced: int) -> None:
        """groups: that are to be dealt again; replaced: how many others were refused, for which there are spares."""
        self._refused[partition] += len(groups) + replaced
        places = self._places[partition]
        dealt = self._refused[partition] + places
        if dealt > self._rounds * places:
            self._give_up(
                f"refused {self._refused[partition]} of {dealt} groups that were dealt for the {places} of batch "
                f"{partition.removeprefix('train_')}, and algorithm.filter_rounds={self._rounds}",
                ", or raise algorithm.filter_rounds",
            )
        if any(self._deals.get(group, 0) + 1 >= _MOST_DEALS for group in groups):
            self._give_up(
                f"refused {_MOST_DEALS} groups in a row for one place of batch {partition.removeprefix('train_')}, "
                "as many as sample ids have room for"
            )

    def _give_up(self, what: str, further: str = "") -> NoReturn:
        who = " and ".join(reason.setting for reason in self._reasons)
        raise ConfigError(f"{who} {what}; {', or '.join(reason.fix for reason in self._reasons)}{further}")


def _place_of(group: int) -> int:
    """Place of a group by its number, which says as well how often the place was dealt another before."""
    return group % DEALT_AGAIN


def _refusal(partition: str, group: int, at: float, verdict: _Verdict | None, *, replaced: bool = False) -> Refusal:
    assert verdict is not None and verdict.reason is not None, "it was refused"
    return Refusal(iteration_of(partition), group, at, verdict.rewards, verdict.reason, replaced)


def _number(reward: float) -> float | None:
    return reward if math.isfinite(reward) else None


class WholeRunPool(StagePool):
    """A stage that works from the beginning of a run to its end, whatever a schedule asks: where a filter follows, it
    is part of what makes a batch, and not of what is done with one."""

    async def process(self, iteration: int) -> None:
        """Do nothing: whoever reads what it writes waits for it."""

    async def stream(self) -> None:
        """Do nothing: it streams already."""

    async def work(self) -> None:
        """Work until the prompts are closed and done."""
        await super().stream()
