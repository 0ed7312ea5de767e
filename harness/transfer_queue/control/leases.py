"""Who holds which rows, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from harness.transfer_queue.control.policies import Units


class LeaseExpired(RuntimeError):
    """The rows of this lease went back to the queue (it ran out, or its consumer was released): drop the work."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part of a micro-batch; numbered in the order they were formed. `count`: rows a rank asked for."""

    number: int
    partition: str
    units: Units
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A share in a consumer's hands; `due`: when it runs out, None = never."""

    number: int
    task: str
    rank: int
    consumer: str
    share: Share
    due: float | None


class Leases:
    """The open leases, numbered from 0 in hand-out order. Times are the caller's."""

    def __init__(self) -> None:
        self._open: dict[int, Lease] = {}
        self._due: list[tuple[float, int]] = []
        self._lost: set[int] = set()
        self._next = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._open.values()))

    def issue(self, task: str, rank: int, consumer: str, share: Share, due: float | None) -> Lease:
        lease = Lease(self._next, task, rank, consumer, share, due)
        self._next += 1
        self._open[lease.number] = lease
        if due is not None:
            heappush(self._due, (due, lease.number))
        return lease

    def close(self, number: int) -> Lease | None:
        """End a lease; None if it ended before. ValueError for a number that was never given."""
        if not 0 <= number < self._next:
            raise ValueError(f"lease {number} was never given; {self._next} leases were, numbered from 0")
        return self._open.pop(number, None)

    def lose(self, lease: Lease) -> None:
        """End a lease that its consumer does not know to be over: it is told when it acknowledges."""
        del self._open[lease.number]
        self._lost.add(lease.number)

    def check_kept(self, number: int) -> None:
        """Raise LeaseExpired if the lease was lost."""
        if number in self._lost:
            raise LeaseExpired(f"lease {number} is over and its rows go out again: drop what was made of them")

    def next_due(self) -> float | None:
        """When the next lease runs out."""
        while self._due and self._due[0][1] not in self._open:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def overdue(self, now: float) -> list[Lease]:
        """Open leases that ran out at or before `now`, taken off the schedule."""
        late = []
        while (due := self.next_due()) is not None and due <= now:
            late.append(self._open[heappop(self._due)[1]])
        return late
