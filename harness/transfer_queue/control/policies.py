"""In which order a task's ready units are handed out: pure state machines, one per task and partition.

A unit is what a task takes at a time: a row, or a group where it wants groups whole. Units are numbered in the
partition's order. To add a policy, write a class and its line in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


class Policy(Protocol):
    strict_partitions: bool
    """Whether a reader of any partition waits for the oldest one that has units left, rather than pass it over."""

    def add(self, units: Units, tick: int) -> None:
        """Units that became ready; ticks count the puts that made any ready, over all partitions."""

    def put_back(self, units: Units) -> None:
        """Units that were taken or removed, and are ready to go out again."""

    def remove(self, units: Units) -> None:
        """Units, ready or not, that are dealt with out of turn: nobody waits for theirs."""

    def take(self, least: int, most: int, limit: int) -> Units | None:
        """Up to `most` units below `limit`, in the policy's order; None, and nothing taken, where there are fewer
        than `least`. Never looks at a unit on its own that it does not hand out."""

    def in_order(self, units: Units) -> Units:
        """Ready units (ascending), in the policy's order."""

    def turn(self, limit: int, among: Units | None) -> int:
        """Of several partitions, the one with the lowest turn goes first; of equal ones, the oldest. That of the ready
        units below `limit`, or of ready units `among`."""

    def __len__(self) -> int:
        """Ready units that were not taken, whether their turn has come or not."""


class Ready:
    """The lowest ready unit first; what is not ready holds nobody up."""

    strict_partitions = False

    def __init__(self, units: int) -> None:
        self._ready = bytearray(units)  # 1 = waits to be handed out; searched at the speed of memory
        self._flags = np.frombuffer(self._ready, np.uint8)  # the same bytes

    def add(self, units: Units, tick: int) -> None:
        self.put_back(units)

    def put_back(self, units: Units) -> None:
        self._flags[units] = 1

    def remove(self, units: Units) -> None:
        self._flags[units] = 0

    def take(self, least: int, most: int, limit: int) -> Units | None:
        taken: list[int] = []
        unit = self._ready.find(1, 0, limit)
        while unit >= 0 and len(taken) < most:
            taken.append(unit)
            unit = self._ready.find(1, unit + 1, limit)
        if len(taken) < least:
            return None
        units = np.array(taken, np.int64)
        self._flags[units] = 0
        return units

    def in_order(self, units: Units) -> Units:
        return units

    def turn(self, limit: int, among: Units | None) -> int:
        return 0

    def __len__(self) -> int:
        return self._ready.count(1)


class Fifo(Ready):
    """Strictly in order: a unit waits until all before it were ready, so the k-th batch never depends on timing.

    Those that came back are before the others, so they go first.
    """

    strict_partitions = True

    def __init__(self, units: int) -> None:
        super().__init__(units)
        self._come = bytearray(units + 1)  # 1 = was ready once, or removed; the last one stays 0: a fence
        self._come_flags = np.frombuffer(self._come, np.uint8)
        self._frontier = 0  # the first that has not come

    def add(self, units: Units, tick: int) -> None:
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


class Completion(Ready):
    """The unit that became ready first goes first, whatever its number and its partition."""

    def __init__(self, units: int) -> None:
        super().__init__(units)
        self._tick = np.zeros(units, np.int64)

    def add(self, units: Units, tick: int) -> None:
        self._tick[units] = tick
        super().add(units, tick)

    def take(self, least: int, most: int, limit: int) -> Units | None:
        units = self.in_order(np.flatnonzero(self._flags[:limit]))[:most]
        if units.size < least:
            return None
        self._flags[units] = 0
        return units

    def in_order(self, units: Units) -> Units:
        return units[np.argsort(self._tick[units], kind="stable")]

    def turn(self, limit: int, among: Units | None) -> int:
        ready = np.flatnonzero(self._flags[:limit]) if among is None else among
        return int(self._tick[ready].min(initial=NEVER))


POLICIES: dict[str, Callable[[int], Policy]] = {"fifo": Fifo, "ready": Ready, "completion": Completion}
"""Name -> a policy for a partition of this many units."""


def split(units: Units, ranks: int) -> list[Units]:
    """Contiguous shares, one a rank, of equal size where it divides, else as even as can be, the first ones longer."""
    return [units] if ranks == 1 else np.array_split(units, ranks)
