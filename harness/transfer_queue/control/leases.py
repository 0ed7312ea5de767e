"""Micro-batches cut into shares, one for each data-parallel rank; and who holds which of them until when."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import isinf
from typing import Any, NamedTuple

import numpy as np

from harness.transfer_queue.control.policies import Units
from harness.transfer_queue.control.spec import GetRequest, QueueSpec


class Share(NamedTuple):
    """One rank's part of a micro-batch; numbered in the order they were formed. `asked`: rows that a rank asked for."""

    number: int
    partition: str
    units: Units
    asked: int


class Shares:
    """The shares that were formed and each rank has still to collect, by task and rank."""

    def __init__(self, spec: QueueSpec) -> None:
        self._waiting: dict[str, list[list[Share]]] = {
            name: [[] for _ in range(task.ranks)] for name, task in spec.tasks.items()
        }
        self._to_collect = Counter[str]()  # by partition
        self._formed = 0

    def form(self, task: str, partition: str, parts: Sequence[Units], count: int) -> None:
        """A micro-batch: leave rank r the share parts[r]."""
        for part, waiting in zip(parts, self._waiting[task], strict=True):
            waiting.append(Share(self._formed, partition, part, count))
        self._to_collect[partition] += len(parts)
        self._formed += 1

    def next(self, request: GetRequest) -> Share | None:
        """The oldest that this rank has to collect, of the partition if it names one; ValueError if it was formed
        for another count."""
        for share in self._waiting[request.task][request.rank]:
            if request.partition in (None, share.partition):
                if share.asked != request.count:
                    raise ValueError(
                        f"rank {request.rank} of task {request.task!r} asks for {request.count} rows where another "
                        f"rank asked for {share.asked}: all readers must ask for the same"
                    )
                return share
        return None

    def collect(self, request: GetRequest, share: Share) -> None:
        """Note that this rank takes the share."""
        self._waiting[request.task][request.rank].remove(share)
        self._to_collect[share.partition] -= 1

    def put_back(self, task: str, rank: int, share: Share) -> None:
        """Let this rank collect the share again, in its old turn."""
        insort(self._waiting[task][rank], share, key=lambda waiting: waiting.number)
        self._to_collect[share.partition] += 1

    def state(self) -> dict[str, Any]:
        """Plain data and arrays, which are its own: to be encoded at once."""
        waiting = {task: [[tuple(share) for share in w] for w in ranks] for task, ranks in self._waiting.items()}
        return {"waiting": waiting, "formed": self._formed}

    def restore(self, state: dict[str, Any]) -> None:
        """New ones go on as those were."""
        self._formed = state["formed"]
        for task, ranks in state["waiting"].items():
            self._waiting[task] = [[Share(*share) for share in waiting] for waiting in ranks]
            self._to_collect.update(share.partition for waiting in self._waiting[task] for share in waiting)

    def any_of(self, partition: str) -> bool:
        """Whether a rank has to collect a share of it."""
        return self._to_collect[partition] > 0

    def forget(self, partition: str) -> None:
        """The partition was cleared."""
        if self._to_collect.pop(partition, 0):
            for waiting in [waiting for ranks in self._waiting.values() for waiting in ranks]:
                waiting[:] = [share for share in waiting if share.partition != partition]


LOST_KEPT = 10_000


class LeaseExpired(RuntimeError):
    """The rows of this lease went back to the queue (it ran out, or its consumer was released): drop the work."""


class Lease(NamedTuple):
    """A share in a consumer's hands; `due`: when it runs out, None = never."""

    number: int
    task: str
    rank: int
    consumer: str
    share: Share
    due: float | None


class Leases:
    """The open leases, numbered from 0 in dispatch order. Times are the caller's."""

    def __init__(self) -> None:
        self._open: dict[int, Lease] = {}
        self._of: dict[str, dict[int, Lease]] = {}  # the same, by partition
        self._due: list[tuple[float, int]] = []
        self._lost: set[int] = set()  # the latest of them
        self._lost_order: list[int] = []  # a heap of the same
        self._forgotten = -1  # the highest of those that were lost and are not kept
        self._next = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._open.values()))

    def of(self, partition: str) -> list[Lease]:
        """The open leases of rows of this partition."""
        return list(self._of.get(partition, {}).values())

    def forget(self, partition: str) -> None:
        """The partition was cleared: its leases are over."""
        for number in self._of.pop(partition, {}):
            del self._open[number]

    def get(self, number: int) -> Lease | None:
        """The open lease of this number."""
        return self._open.get(number)

    def issue(self, request: GetRequest, share: Share, due: float | None) -> Lease:
        """A new lease on a share. due: when it runs out."""
        lease = Lease(self._next, request.task, request.rank, request.consumer, share, due)
        self._next += 1
        self._keep(lease)
        return lease

    def _keep(self, lease: Lease) -> None:
        self._open[lease.number] = self._of.setdefault(lease.share.partition, {})[lease.number] = lease
        if lease.due is not None and not isinf(lease.due):
            heappush(self._due, (lease.due, lease.number))
            if len(self._due) > 2 * len(self._open) + 64:  # most of them ended long before they were due
                self._due = [(at, number) for at, number in self._due if number in self._open]
                heapify(self._due)

    def close(self, number: int) -> Lease | None:
        """End a lease; None if it ended before. ValueError for a number that was never given."""
        if not 0 <= number < self._next:
            raise ValueError(f"lease {number} was never given; {self._next} leases were, numbered from 0")
        lease = self._open.pop(number, None)
        if lease is not None:
            del self._of[lease.share.partition][number]
        return lease

    def without(self, lease: Lease, units: set[int]) -> None:
        """Take units out of a lease, with which its consumer has nothing more to do."""
        if not units.isdisjoint(held := lease.share.units.tolist()):  # most leases hold one unit, and none of these
            kept = np.array([unit for unit in held if unit not in units], lease.share.units.dtype)
            self._keep(lease._replace(share=lease.share._replace(units=kept)))

    def reassign(self, lease: Lease, units: set[int], consumer: str) -> None:
        """Put units of a lease into the hands of another consumer, by a lease of its own."""
        if moved := [unit for unit in lease.share.units.tolist() if unit in units]:
            self.without(lease, units)
            share = lease.share._replace(units=np.array(moved, lease.share.units.dtype))
            self._keep(lease._replace(number=self._next, consumer=consumer, share=share))
            self._next += 1

    def lose(self, lease: Lease) -> None:
        """End a lease that its consumer does not know to be over: its acknowledgement fails."""
        self.close(lease.number)
        self._lost.add(lease.number)
        heappush(self._lost_order, lease.number)
        if len(self._lost) > LOST_KEPT:
            self._forgotten = heappop(self._lost_order)
            self._lost.remove(self._forgotten)

    def state(self) -> dict[str, Any]:
        """Plain data and arrays, which are its own: to be encoded at once."""
        return {
            "open": [(x.number, x.task, x.rank, x.consumer, tuple(x.share), x.due) for x in self._open.values()],
            "lost": self._lost_order,
            "forgotten": self._forgotten,
            "next": self._next,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """New ones go on as those were."""
        for number, task, rank, consumer, share, due in state["open"]:
            self._keep(Lease(number, task, rank, consumer, Share(*share), due))
        self._lost_order = state["lost"]
        self._lost = set(self._lost_order)
        self._forgotten = state["forgotten"]
        self._next = state["next"]

    def shift(self, seconds: float) -> None:
        """The caller's clock was put forward by so much."""
        leases = list(self._open.values())
        self._due.clear()
        for lease in leases:
            self._keep(lease._replace(due=None if lease.due is None else lease.due + seconds))

    def check_kept(self, number: int) -> None:
        """Raise LeaseExpired if the lease was lost; or if it is over, and so old that how it ended is not kept."""
        if number in self._lost or (0 <= number <= self._forgotten and number not in self._open):
            raise LeaseExpired(f"lease {number} is over and its rows go out again: drop what was made of them")

    def next_due(self) -> float | None:
        """Time at which the next lease runs out."""
        while self._due and self._due[0][1] not in self._open:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def overdue(self, now: float) -> list[Lease]:
        """Open leases that ran out at or before `now`, taken off the schedule."""
        late = []
        while (due := self.next_due()) is not None and due <= now:
            late.append(self._open[heappop(self._due)[1]])
        return late
