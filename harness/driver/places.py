"""The fate of groups that filters judge, and of the places that they have in the queue: pure, no I/O."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from harness.config import ConfigError
from harness.config.job import DEALT_AGAIN
from harness.driver.checkpoint_files import Decision, RefilledPartition, RefilledState, Refusal
from harness.metrics.ledger import DropReason

_MOST_DEALS = 1 << 8  # of one place, that ids have room for


class Candidates:
    """The choice of the groups of one batch that are trained where more are admitted at first than it needs.

    Candidates are numbered in the queue's order: the batch's places, then its spares. As many as there are spares may
    be refused, and are replaced by those behind them; beyond that, the place of a refused one is dealt another group.
    What becomes of a candidate follows from what a filter says of those before it and of itself, and from nothing else:
    it is decided as soon as it cannot come otherwise, and does not depend on which verdict came first.

    decided: what is certain of whom; given by a checkpoint, which need not know of those that were kept: they are
    judged again."""

    def __init__(self, places: int, spares: int, decided: Iterable[tuple[int, Decision]] = ()) -> None:
        self.places, self.spares = places, spares
        self.decided: dict[int, Decision] = {}
        self._judged = np.zeros(places + spares, bool)
        self._refused = np.zeros(places + spares, bool)
        for candidate, decision in decided:
            self.remember(candidate, decision)

    def remember(self, candidate: int, decision: Decision) -> None:
        """Take over what was decided before."""
        self.decided[candidate] = decision
        if decision != "spare":
            self.judged(candidate, passed=decision == "kept")

    def judged(self, candidate: int, passed: bool) -> None:
        """Note what the filter said of the group that it was first."""
        self._judged[candidate], self._refused[candidate] = True, not passed

    def decide(self) -> dict[int, Decision]:
        """Decisions that are certain now, and were not before."""
        refused = np.cumsum(self._refused) - self._refused  # before each
        at_most = refused + np.cumsum(~self._judged) - ~self._judged
        # How many before each are kept, or are once their places were dealt others: all but those that spares replace.
        order = np.arange(len(refused))
        ahead = (order - np.minimum(self.spares, at_most), order - np.minimum(self.spares, refused))
        found: dict[int, Decision] = {}
        for candidate in order[[number not in self.decided for number in order.tolist()]].tolist():
            least, most = ahead[0][candidate], ahead[1][candidate]
            if least >= self.places:
                found[candidate] = "spare"
            elif not self._judged[candidate] or most >= self.places:
                continue
            elif not self._refused[candidate]:
                found[candidate] = "kept"
            elif refused[candidate] >= self.spares:
                found[candidate] = "again"
            elif at_most[candidate] < self.spares:
                found[candidate] = "refused"
        self.decided |= found
        return found


@dataclass(frozen=True)
class Verdict:
    """The verdict on a group. reason: why it is refused, if it is; rewards: of its samples, None for what no file can
    hold."""

    reason: DropReason | None
    rewards: list[float | None]


@dataclass(frozen=True)
class Decisions:
    """Decisions on groups of one partition. kept: they are trained; refused: a spare takes the part of each; again:
    refused, and their places are dealt others; spare: not needed; given_up: of refused and spare ones, and of those
    that were given up before they were judged, who is done with; verdicts: on refused and spare ones."""

    kept: list[int]
    refused: list[int]
    again: list[int]
    spare: list[int]
    given_up: list[int]
    verdicts: Mapping[int, Verdict]


@dataclass
class _Partition:
    """first: its first group; refused: how many groups were."""

    first: int
    candidates: Candidates
    refused: int = 0


@dataclass
class Places:
    """The places of a job's groups: a place is a group's rows in the queue, and is dealt other prompts until its group
    is kept. spares: groups that are admitted with each batch besides its own, to replace the first that are refused, in
    the queue behind these; rounds: how many times a batch may be generated; who, fix: settings that refuse groups, and
    what to do where they refuse too many."""

    spares: int
    rounds: int
    who: str
    fix: str
    failure: str = ""
    """Why a sample could not be scored, the last time that one could not."""
    dealt: dict[int, int] = field(default_factory=dict)
    """Count of the prompts besides its first that each place was dealt."""
    _partitions: dict[int, _Partition] = field(default_factory=dict)
    _judged: dict[int, Verdict] = field(default_factory=dict)  # groups of which nothing is decided yet
    _unneeded: set[int] = field(default_factory=set)  # groups that were given up before they were judged
    _stale: set[int] = field(default_factory=set)  # places whose groups will not be trained anyway
    _since: list[Refusal] | None = None  # a checkpoint was begun whose queue is not saved

    def made(self, partition: int, first: int, groups: int) -> None:
        """Note that a partition has so many groups, spares included, from this one on."""
        self._partitions[partition] = _Partition(first, Candidates(groups - self.spares, self.spares))

    def stale(self, groups: Iterable[int]) -> None:
        """Note that these groups will not be trained, whatever is said of them."""
        self._stale.update(groups)

    def judge(self, partition: int, verdicts: Mapping[int, Verdict]) -> Decisions:
        """Decisions that are certain with these verdicts, and were not before. Raises ConfigError where a batch would
        be generated too often."""
        self._judged |= verdicts
        late = list(self._unneeded & verdicts.keys())
        decided = self._decided(self._partitions[partition], verdicts)
        kept, refused, again, spare = (
            [group for group, decision in decided.items() if decision == one]
            for one in ("kept", "refused", "again", "spare")
        )
        self._check_rounds(partition, again, len(refused))
        made = {group: self._judged.pop(group, None) for group in (*decided, *late)}
        unjudged = {group for group in spare if made[group] is None}
        self._unneeded = (self._unneeded | unjudged) - set(late)
        given_up = [group for group in (*refused, *spare, *late) if group not in unjudged]
        said = {group: verdict for group in (*refused, *again, *spare) if (verdict := made[group]) is not None}
        return Decisions(kept, refused, again, spare, given_up, said)

    def _decided(self, partition: _Partition, verdicts: Mapping[int, Verdict]) -> dict[int, Decision]:
        """Decisions by group: of those that were judged just now, and of those before of which nothing was certain."""
        found = dict[int, Decision]()
        for group, verdict in verdicts.items():
            passed = verdict.reason is None
            if group in self._stale:
                found[group] = "kept"  # nobody trains it
            elif group in self.dealt:
                found[group] = "kept" if passed else "again"
            elif group not in self._unneeded:
                partition.candidates.judged(group - partition.first, passed)
        decided = partition.candidates.decide()
        found |= {partition.first + candidate: decision for candidate, decision in decided.items()}
        return dict(sorted(found.items()))

    def _check_rounds(self, number: int, again: Sequence[int], replaced: int) -> None:
        """replaced: how many were refused besides, for which there are spares."""
        partition = self._partitions[number]
        partition.refused += len(again) + replaced
        refused, places = partition.refused, partition.candidates.places
        if refused + places > self.rounds * places:
            self._give_up(
                f"refused {refused} of {refused + places} groups that were dealt for the {places} of batch {number}, "
                f"and algorithm.filter_rounds={self.rounds}",
                ", or raise algorithm.filter_rounds",
            )
        if any(self.dealt.get(place, 0) + 1 >= _MOST_DEALS for place in again):
            self._give_up(
                f"refused {_MOST_DEALS} groups in a row for one place of batch {number}, as many as sample ids have "
                "room for"
            )

    def _give_up(self, what: str, further: str = "") -> NoReturn:
        why = f"; there was {self.failure}" if self.failure else ""
        raise ConfigError(f"{self.who} {what}; {self.fix}{further}{why}")

    def deal_again(self, place: int) -> None:
        """Give a place its next prompt."""
        self.dealt[place] = self.dealt.get(place, 0) + 1

    def state(self, in_flight: Collection[int], partitions: Iterable[int]) -> RefilledState:
        """State of these places and partitions, for a checkpoint; from now on refusals are remembered for it."""
        self._since, parts = [], []
        for number in partitions:
            one = self._partitions[number]
            decided = sorted(one.candidates.decided.items())
            certain: list[tuple[int, Decision]] = [pair for pair in decided if pair[1] != "kept"]
            parts.append(RefilledPartition(number, one.candidates.places, one.refused, certain))
        return RefilledState([(place, self.dealt[place]) for place in sorted(in_flight & self.dealt.keys())], parts)

    def note(self, refusal: Refusal) -> None:
        """Remember a refusal where a checkpoint is to have it."""
        if self._since is not None:
            self._since.append(refusal)

    def noted_since(self) -> list[Refusal]:
        """Refusals since `state` was asked for."""
        since, self._since = self._since, None
        return since or []

    def load(self, state: RefilledState, firsts: Mapping[int, int]) -> None:
        """Go on from what `state` gave. firsts: of each partition, its first group."""
        self.dealt = dict(state.deals)
        for part in state.partitions:
            candidates = Candidates(part.places, self.spares, part.decided)
            self._partitions[part.number] = _Partition(firsts[part.number], candidates, part.refused)

    def refused_once_more(self, refusal: Refusal) -> None:
        """Take over what was decided of a group before the run went on from a checkpoint."""
        partition = self._partitions[refusal.partition]
        partition.refused += 1
        candidate = refusal.place - partition.first
        if candidate not in partition.candidates.decided:  # what was decided when the place was first refused
            partition.candidates.remember(candidate, "refused" if refusal.replaced else "again")


def place_of(group: int) -> int:
    """The place of a group, by its number, which says as well how often the place was dealt another before."""
    return group % DEALT_AGAIN
