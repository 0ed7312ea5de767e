"""The order in which a task's ready units are dispatched, and how a micro-batch is cut into shares for its ranks.

A policy is a pure state machine, one per task and partition.

A unit is what a task takes at a time: a row, or a group where it wants groups whole. Units are numbered in the
partition's order. To add a policy, write a class and its line in POLICIES. What a call costs depends on the units that
it adds or takes, not on how many there are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.int64]
Weights = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


class Policy(Protocol):
    """The order of one task's units in one partition."""

    strict_partitions: ClassVar[bool] = False
    """Whether a reader of any partition waits for the oldest one that has units left, rather than pass it over."""
    takes_turns: ClassVar[bool] = False
    """Whether `turn` says which partition goes first; otherwise the oldest one does."""
    weighs: ClassVar[bool] = False
    """Whether it needs the units' weights."""

    def __init__(self, units: int) -> None: ...

    def add(self, units: Units, tick: int, weights: Weights | None = None) -> None:
        """Units that became ready, each for the first time; ticks count the puts that made any ready, over all
        partitions. weights: one a unit, where the task has any."""

    def put_back(self, units: Units) -> None:
        """Units that were taken or removed, and are ready to go out again."""

    def remove(self, units: Units) -> None:
        """Units, ready or not, that are dealt with out of turn: none waits for them."""

    def take(self, least: int, most: int, limit: int) -> Units | None:
        """Up to `most` units below `limit`, in the policy's order; None, and nothing taken, where there are fewer
        than `least`."""

    def in_order(self, units: Units) -> Units:
        """Ready units (ascending), in the policy's order."""

    def turn(self, limit: int, among: Units | None) -> int:
        """The turn: of several partitions, the one with the lowest goes first; of equal ones, the oldest. It is that of
        the ready units below `limit`, or of ready units `among`. Asked only where the policy takes turns."""
        return 0

    def __len__(self) -> int:
        """Ready units that were not taken, whether their turn has come or not."""

    def state(self) -> dict[str, Any]:
        """Everything that it knows, as plain data and arrays, which may be its own: to be encoded at once."""

    def restore(self, state: dict[str, Any]) -> None:
        """A new one goes on as that one was."""


class Ready(Policy):
    """The lowest ready unit first; what is not ready holds nothing up."""

    def __init__(self, units: int) -> None:
        self._ready = bytearray(units)  # 1 = waits to be dispatched; searched at the speed of memory
        self._flags = np.frombuffer(self._ready, np.uint8)  # the same bytes
        self._low = 0  # no lower unit waits: what was searched is not searched again
        self._count = 0

    def add(self, units: Units, tick: int, weights: Weights | None = None) -> None:
        self.put_back(units)

    def put_back(self, units: Units) -> None:
        if units.size:
            self._flags[units] = 1
            self._low = min(self._low, *units.tolist())
            self._count += units.size

    def remove(self, units: Units) -> None:
        self._count -= int(np.count_nonzero(self._flags[units]))
        self._flags[units] = 0

    def take(self, least: int, most: int, limit: int) -> Units | None:
        if self._count < least:
            return None
        found: list[int] = []
        unit = self._find(self._low, limit)
        self._low = max(self._low, unit)
        while unit < limit and len(found) < most:
            stop = min(unit + most - len(found), limit)
            end = self._ready.find(0, unit, stop)
            found.extend(range(unit, stop if end < 0 else end))
            unit = self._find(found[-1] + 1, limit)
        if len(found) < least:
            return None
        units = np.array(found, np.int64)
        self._flags[units] = 0
        self._low = found[-1] + 1
        self._count -= len(found)
        return units

    def _find(self, start: int, limit: int) -> int:
        """The first unit from `start` on that waits, or the limit."""
        unit = self._ready.find(1, start, limit)
        return limit if unit < 0 else unit

    def in_order(self, units: Units) -> Units:
        return units

    def __len__(self) -> int:
        return self._count

    def state(self) -> dict[str, Any]:
        return {"ready": self._flags}

    def restore(self, state: dict[str, Any]) -> None:
        self.put_back(np.flatnonzero(state["ready"]))


class Fifo(Ready):
    """Strictly in order: a unit waits until all before it were ready, so the k-th batch never depends on timing.

    Those that came back are before the others, so they go first.
    """

    strict_partitions: ClassVar[bool] = True

    def __init__(self, units: int) -> None:
        super().__init__(units)
        self._come = bytearray(units + 1)  # 1 = was ready once, or removed; the last one stays 0: a fence
        self._come_flags = np.frombuffer(self._come, np.uint8)
        self._frontier = 0  # the first that has not come

    def add(self, units: Units, tick: int, weights: Weights | None = None) -> None:
        self._pass(units)
        super().add(units, tick)

    def remove(self, units: Units) -> None:
        self._pass(units)
        super().remove(units)

    def _pass(self, units: Units) -> None:
        self._come_flags[units] = 1
        self._frontier = self._come.find(0, self._frontier)

    def take(self, least: int, most: int, limit: int) -> Units | None:
        return super().take(least, most, min(limit, self._frontier))

    def state(self) -> dict[str, Any]:
        return super().state() | {"come": self._come_flags}

    def restore(self, state: dict[str, Any]) -> None:
        self._pass(np.flatnonzero(state["come"]))
        super().restore(state)


_UNIT_BITS = 32
_UNIT_MASK = (1 << _UNIT_BITS) - 1
_LIMITS_KEPT = 4


class Keyed(Policy):
    """The ready unit with the lowest key first; of equal ones, the lowest unit.

    A heap for each limit that readers have, of `key << 32 | unit`. What leaves out of turn is left in the heaps and
    passed over when it comes up; a heap for a new limit is made of what is ready.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self._flags = bytearray(units)  # 1 = waits to be dispatched
        self._waits = np.frombuffer(self._flags, np.uint8)  # the same bytes
        self._count = 0
        self._key = np.zeros(units, np.int64)
        self._heaps: dict[int, list[int]] = {units: []}  # by limit, the latest used one last

    def put_back(self, units: Units) -> None:
        """Make units ready again."""
        entries = self._entries(units)
        self._waits[units] = 1
        self._count += len(entries)
        for limit, heap in list(self._heaps.items()):
            for entry in entries:
                if entry & _UNIT_MASK < limit:
                    heappush(heap, entry)
            if len(heap) > 2 * self._units:  # what comes back leaves its old entry behind
                del self._heaps[limit]

    def _entries(self, units: Units) -> list[int]:
        return [key << _UNIT_BITS | unit for key, unit in zip(self._key[units].tolist(), units.tolist(), strict=True)]

    def remove(self, units: Units) -> None:
        """Take units out."""
        self._count -= int(np.count_nonzero(self._waits[units]))
        self._waits[units] = 0

    def take(self, least: int, most: int, limit: int) -> Units | None:
        """Take units as `Policy.take` says."""
        if self._count < least:
            return None
        heap, flags, taken = self._heap(limit), self._flags, list[int]()
        while heap and len(taken) < most:
            entry = heappop(heap)
            unit = entry & _UNIT_MASK
            if flags[unit]:
                flags[unit] = 0
                taken.append(entry)
        units = np.array([entry & _UNIT_MASK for entry in taken], np.int64)
        if len(taken) < least:
            self._waits[units] = 1
            heap += taken  # ascending, and there is nothing else in it
            return None
        self._count -= len(taken)
        return units

    def _heap(self, limit: int) -> list[int]:
        limit = min(limit, self._units)
        if limit not in self._heaps:
            if len(self._heaps) == _LIMITS_KEPT:
                del self._heaps[next(iter(self._heaps))]
            units = np.flatnonzero(self._waits[:limit])
            self._heaps[limit] = sorted(self._entries(units))
        self._heaps[limit] = heap = self._heaps.pop(limit)
        return heap

    def in_order(self, units: Units) -> Units:
        """Units by their keys."""
        return units[np.argsort(self._key[units], kind="stable")]

    def __len__(self) -> int:
        return self._count

    def state(self) -> dict[str, Any]:
        """Everything that it knows, as plain data and arrays."""
        return {"ready": self._waits, "key": self._key}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self._key = state["key"]
        self.put_back(np.flatnonzero(state["ready"]))


class CompletionFirst(Keyed):
    """The unit that became ready first goes first, whatever its number and its partition."""

    takes_turns: ClassVar[bool] = True

    def add(self, units: Units, tick: int, weights: Weights | None = None) -> None:
        self._key[units] = tick
        self.put_back(units)

    def turn(self, limit: int, among: Units | None) -> int:
        if among is not None:
            return int(self._key[among].min(initial=NEVER))
        heap = self._heaps.get(limit)
        if heap is None:
            heap = self._heap(limit)
        while heap and not self._flags[heap[0] & _UNIT_MASK]:
            heappop(heap)
        return heap[0] >> _UNIT_BITS if heap else NEVER


class LongestFirst(Keyed):
    """The heaviest ready unit first, so that what takes longest is not begun last; of partitions the oldest."""

    weighs: ClassVar[bool] = True

    def add(self, units: Units, tick: int, weights: Weights | None = None) -> None:
        if weights is not None:
            self._key[units] = -weights
        self.put_back(units)


POLICIES: dict[str, type[Policy]] = {
    "fifo": Fifo,
    "ready": Ready,
    "completion": CompletionFirst,
    "longest_first": LongestFirst,
}
"""Name -> a policy for a partition of this many units."""


def policy_of(name: str) -> type[Policy]:
    """A policy by its name here, or one of the user's by its import path, `package.module:Class`."""
    module, colon, attribute = name.partition(":")
    return getattr(import_module(module), attribute) if colon else POLICIES[name]


_EVEN_ENOUGH = 1e-3  # of the heaviest share: no rank notices less
_LIGHTEST = 4  # shares that the heaviest one tries to swap with
_TRIES_PER_SHARE = 4


@dataclass(frozen=True, slots=True)
class Split:
    """cut(weights int64 [n], shares) -> for each share the indices of what it gets, ascending."""

    cut: Callable[[Weights, int], list[NDArray[np.int64]]]
    weighs: bool

    def __call__(self, units: Units, shares: int, weights: Weights | None, before: int = 0) -> list[Units]:
        """units: in the order in which they are dispatched, which each share keeps; weights: one a unit, needed where
        the split weighs: then its shares, the heaviest first, go to the ranks from the last to the first every second
        time. before: units of the partition that were dispatched."""
        if shares == 1:
            return [units]
        weights = np.ones(units.size, np.int64) if weights is None else weights
        parts = [units[indices] for indices in self.cut(weights, shares)]
        backwards = self.weighs and units.size % shares == 0 and before // units.size % 2
        return parts[::-1] if backwards else parts


def contiguous(weights: Weights, shares: int) -> list[NDArray[np.int64]]:
    """One stretch after the other."""
    return np.array_split(np.arange(weights.size), shares)


def balanced(weights: Weights, shares: int) -> list[NDArray[np.int64]]:
    """Shares of nearly equal weight: dealt out heaviest first, there and back again, then evened out by exchanges
    between the heaviest share and the lightest ones (after Finn and Horowitz, "A linear time approximation algorithm
    for multiprocessor scheduling", BIT 19, 1979, with pairs exchanged so that sizes stay)."""
    order = np.argsort(-weights, kind="stable")
    deal = np.arange(weights.size) % (2 * shares)
    dealt = np.minimum(deal, 2 * shares - 1 - deal)  # 0 1 2 2 1 0 0 1 2 ...
    parts = sorted((order[dealt == share] for share in range(shares)), key=lambda part: -part.size)
    sums = [int(weights[part].sum()) for part in parts]
    tries = 0
    while tries < _TRIES_PER_SHARE * shares:
        *others, heavy = sorted(range(shares), key=sums.__getitem__)
        for light in others[:_LIGHTEST]:
            tries += 1
            moved = _exchange(parts[heavy], parts[light], weights, sums[heavy], sums[light])
            sums[heavy] -= moved
            sums[light] += moved
            if moved:
                break
        else:
            break
    return [np.sort(part) for part in parts]


def _exchange(heavy: NDArray[np.int64], light: NDArray[np.int64], weights: Weights, more: int, less: int) -> int:
    """Swap the one of a heavy share and the one of a light share that bring the two closest together; more, less: what
    they weigh; the weight that it moves, 0 where no swap does or it would not be noticed."""
    gap = more - less
    if not light.size or gap <= _EVEN_ENOUGH * more:
        return 0
    order = np.argsort(weights[light])
    ascending = weights[light[order]]
    wanted = weights[heavy] - gap / 2  # what would make them equal
    above = np.minimum(np.searchsorted(ascending, wanted), light.size - 1)
    candidates = np.array((above, np.maximum(above - 1, 0)))
    off = np.abs(ascending[candidates] - wanted)
    side, i = divmod(int(off.argmin()), heavy.size)
    j = order[candidates[side, i]]
    moved = int(weights[heavy[i]] - weights[light[j]])
    if not 0 < moved < gap:
        return 0
    heavy[i], light[j] = light[j], heavy[i]
    return moved


# Whatever the cut, shares are of equal size where it divides, else as even as can be, the first ones longer.
SPLITS: dict[str, Split] = {"contiguous": Split(contiguous, weighs=False), "balanced": Split(balanced, weighs=True)}
"""Name -> how ranks share a micro-batch."""
