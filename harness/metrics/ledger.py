"""The account of every sample ever admitted: trained once, dropped for a reason, or still in flight."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal, get_args

import msgspec

DropReason = Literal["stale", "filtered", "baseline", "straggler", "failed", "spare"]

ENGINE_EVENTS = {
    "lost": "was lost, and the run went on without it",
    "leaves": "is leaving, and takes no more samples",
    "left": "has left",
    "joins": "comes back with the next weights",
    "works": "works again",
}
"""Events of a rollout engine during a run, as ledger.json lists them, in words."""


Range = tuple[int, int]  # the first id, and the one after the last


class LedgerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a ledger. trained: (first, end, iteration); dropped: (reason, first, end)."""

    admitted: int
    in_flight: list[Range]
    trained: list[tuple[int, int, int]]
    dropped: list[tuple[DropReason, int, int]]

    @property
    def samples(self) -> int:
        """How many its ranges span, before any is written out."""
        ranges = (*self.in_flight, *(range_[:2] for range_ in self.trained), *(range_[1:] for range_ in self.dropped))
        return sum(max(end - first, 0) for first, end in ranges)


class LedgerError(RuntimeError):
    """A sample was counted twice, came from nowhere, or is missing."""


class _Trained:
    """The samples trained in each iteration, as ranges of ids: one where training keeps the order of admission."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, int]] = []  # (first, end, iteration), disjoint, by first
        self.by_iteration: Counter[int] = Counter()

    def add(self, ids: Iterable[int], iteration: int) -> None:
        for first, end in ranges_of(ids):
            self.by_iteration[iteration] += end - first
            at = bisect_left(self.ranges, (first,))
            if at < len(self.ranges) and self.ranges[at][0] == end and self.ranges[at][2] == iteration:
                end = self.ranges.pop(at)[1]
            if at and self.ranges[at - 1][1] == first and self.ranges[at - 1][2] == iteration:
                at, first = at - 1, self.ranges.pop(at - 1)[0]
            self.ranges.insert(at, (first, end, iteration))

    def iteration_of(self, sample: int) -> int | None:
        """None of one that was not trained."""
        at = bisect_right(self.ranges, sample, key=lambda one: one[0]) - 1
        return self.ranges[at][2] if at >= 0 and sample < self.ranges[at][1] else None

    def __len__(self) -> int:
        return self.by_iteration.total()


def ranges_of(ids: Iterable[int]) -> list[tuple[int, int]]:
    """(first, end) of consecutive ids, ascending."""
    found: list[tuple[int, int]] = []
    for sample in sorted(ids):
        if found and found[-1][1] == sample:
            found[-1] = (found[-1][0], sample + 1)
        else:
            found.append((sample, sample + 1))
    return found


class Ledger:
    """A pure state machine over sample ids: admitted -> in flight -> trained or dropped. Does no I/O. A call that is
    refused changes nothing."""

    def __init__(self) -> None:
        self._admitted = 0
        self._in_flight: set[int] = set()
        self._trained = _Trained()
        self._dropped: dict[int, DropReason] = {}

    def admit(self, ids: Iterable[int]) -> None:
        """Samples enter. Raises LedgerError for one that was admitted before."""
        ids = self._each_once("admitted", ids)
        for sample in ids:
            if sample in self._in_flight or sample in self._dropped or self._trained.iteration_of(sample) is not None:
                raise LedgerError(f"sample {sample} is admitted a second time: it is {self._fate(sample)}")
        self._in_flight.update(ids)
        self._admitted += len(ids)

    def trained(self, ids: Iterable[int], iteration: int) -> None:
        """Samples were trained in `iteration`. Raises LedgerError for one that is not in flight."""
        ids = self._leaving(f"trained in iteration {iteration}", ids)
        self._trained.add(ids, iteration)

    def dropped(self, ids: Iterable[int], reason: DropReason) -> None:
        """Samples will not be trained. Raises LedgerError for one that is not in flight, ValueError for the reason."""
        if reason not in get_args(DropReason):
            raise ValueError(f"unknown drop reason {reason!r}; one of {', '.join(get_args(DropReason))}")
        ids = self._leaving(f"dropped as {reason}", ids)
        self._dropped.update(dict.fromkeys(ids, reason))

    @property
    def in_flight(self) -> frozenset[int]:
        """Samples admitted and neither trained nor dropped."""
        return frozenset(self._in_flight)

    def counts(self) -> dict[str, int]:
        """Samples by fate, keys as in the ledger/* metrics without the prefix."""
        reasons = Counter(self._dropped.values())
        return {
            "admitted": self._admitted,
            "trained": len(self._trained),
            **{f"dropped_{reason}": reasons[reason] for reason in get_args(DropReason)},
            "in_flight": len(self._in_flight),
        }

    def metrics(self) -> dict[str, float]:
        """The ledger/* metrics."""
        return {f"ledger/{name}": float(count) for name, count in self.counts().items()}

    def check(self, held: Collection[int] | None = None) -> None:
        """Raise LedgerError, with the numbers, unless admitted = trained + dropped + in flight. held: the ids that
        queue and engines really hold now; they must be those in flight, so that a sample lost on the way, or one that
        nobody admitted, is found."""
        counts = self.counts()
        accounted = sum(counts.values()) - self._admitted
        if accounted != self._admitted:
            raise LedgerError(f"the ledger does not close: admitted {self._admitted}, accounted {accounted}: {counts}")
        if held is None:
            return
        lost, unknown = sorted(self._in_flight - set(held)), sorted(set(held) - self._in_flight)
        if lost or unknown:
            raise LedgerError(
                f"in flight are {len(self._in_flight)} samples, held are {len(set(held))}: "
                f"{len(lost)} lost {lost[:8]}, {len(unknown)} held but not in flight {unknown[:8]}"
            )

    def state(self) -> LedgerState:
        """All of it, as it is now."""
        dropped = [
            (reason, *range_)
            for reason in get_args(DropReason)
            for range_ in ranges_of(sample for sample, why in self._dropped.items() if why == reason)
        ]
        return LedgerState(self._admitted, ranges_of(self._in_flight), list(self._trained.ranges), dropped)

    @classmethod
    def restored(cls, state: LedgerState) -> Ledger:
        """A ledger in this state. Raises LedgerError for a state that does not close."""
        ledger = cls()
        ledger._admitted = state.admitted
        ledger._in_flight = {sample for first, end in state.in_flight for sample in range(first, end)}
        for first, end, iteration in state.trained:
            ledger._trained.add(range(first, end), iteration)
        ledger._dropped = {sample: reason for reason, first, end in state.dropped for sample in range(first, end)}
        ledger.check()
        return ledger

    def to_json(self) -> dict[str, object]:
        """Contents of ledger.json: the counts, how many were trained in each iteration, and who was not trained."""
        by_iteration = self._trained.by_iteration
        dropped: dict[str, list[int]] = {reason: [] for reason in get_args(DropReason)}
        for sample in sorted(self._dropped):
            dropped[self._dropped[sample]].append(sample)
        return {
            **self.counts(),
            "trained_by_iteration": {str(i): by_iteration[i] for i in sorted(by_iteration)},
            "in_flight_ids": sorted(self._in_flight),
            "dropped_ids": dropped,
        }

    def _leaving(self, how: str, ids: Iterable[int]) -> list[int]:
        """Take `ids` out of flight, all or none."""
        leaving = self._each_once(how, ids)
        for sample in leaving:
            if sample not in self._in_flight:
                raise LedgerError(f"sample {sample} cannot be {how}: it is {self._fate(sample)}")
        self._in_flight.difference_update(leaving)
        return leaving

    def _each_once(self, how: str, ids: Iterable[int]) -> list[int]:
        listed = [int(sample) for sample in ids]
        if len(set(listed)) < len(listed):
            twice = [sample for sample, times in Counter(listed).items() if times > 1]
            raise LedgerError(f"samples are {how} twice in one call: {twice[:8]}")
        return listed

    def _fate(self, sample: int) -> str:
        if sample in self._in_flight:
            return "in flight"
        if (iteration := self._trained.iteration_of(sample)) is not None:
            return f"trained in iteration {iteration}"
        if sample in self._dropped:
            return f"dropped as {self._dropped[sample]}"
        return "not admitted"
