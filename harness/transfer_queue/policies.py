"""In which order a task's ready units are handed out: pure state machines, one per task and partition.

A unit is what a task takes at a time: a row, or a group where it wants groups whole. Units are numbered in the
partition's order. To add a policy, write a class and its line in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.int64]


class Policy(Protocol):
    strict_partitions: bool
    """Whether a reader of any partition waits for the oldest one that has units left, rather than pass it over."""

    def add(self, units: Units) -> None:
        """Units that became ready, or came back after they had been taken."""

    def take(self, least: int, most: int, limit: int) -> Units | None:
        """Up to `most` units below `limit`, in the policy's order; None, and nothing taken, where there are fewer
        than `least`. Costs O(units asked for), whatever the partition's size."""

    def __len__(self) -> int:
        """Ready units that were not taken, whether their turn has come or not."""


class Ready:
    """The lowest ready unit first; what is not ready holds nobody up."""

    strict_partitions = False

    def __init__(self, units: int) -> None:
        self._heap: list[int] = []

    def add(self, units: Units) -> None:
        for unit in units.tolist():
            heappush(self._heap, unit)

    def take(self, least: int, most: int, limit: int) -> Units | None:
        if len(self._heap) < least:
            return None
        taken = _pop(self._heap, most, limit)
        if len(taken) < least:
            self.add(np.array(taken, np.int64))
            return None
        return np.array(taken, np.int64)

    def __len__(self) -> int:
        return len(self._heap)


class Fifo:
    """Strictly in order: a unit waits until all before it were taken, so the k-th batch never depends on timing.

    Units below `_next` were taken once (those that came back go first), those from `_next` to `_frontier` are ready.
    """

    strict_partitions = True

    def __init__(self, units: int) -> None:
        self._ready = bytearray(units + 1)  # the last one stays 0: a fence for the frontier
        self._next = 0
        self._frontier = 0
        self._returned: list[int] = []
        self._count = 0

    def add(self, units: Units) -> None:
        self._count += units.size
        for unit in units.tolist():
            if unit < self._next:
                heappush(self._returned, unit)
            else:
                self._ready[unit] = 1
        self._frontier = self._ready.find(0, self._frontier)

    def take(self, least: int, most: int, limit: int) -> Units | None:
        if len(self._returned) + self._frontier - self._next < least:
            return None
        returned = _pop(self._returned, most, limit)
        stop = max(self._next, min(self._frontier, limit, self._next + most - len(returned)))
        if len(returned) + stop - self._next < least:
            for unit in returned:
                heappush(self._returned, unit)
            return None
        units = np.concatenate((np.array(returned, np.int64), np.arange(self._next, stop)))
        self._next = stop
        self._count -= units.size
        return units

    def __len__(self) -> int:
        return self._count


POLICIES: dict[str, Callable[[int], Policy]] = {"fifo": Fifo, "ready": Ready}
"""Name -> a policy for a partition of this many units."""


def split(units: Units, ranks: int) -> list[Units]:
    """Contiguous shares, one a rank, of equal size where it divides, else as even as can be, the first ones longer."""
    return np.array_split(units, ranks)


def _pop(heap: list[int], most: int, limit: int) -> list[int]:
    units: list[int] = []
    while heap and heap[0] < limit and len(units) < most:
        units.append(heappop(heap))
    return units
