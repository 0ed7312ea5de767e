"""How far one task is in one partition: which of its units are ready, dispatched, finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.transfer_queue.control.policies import NEVER, Units, Weights, policy_of
from harness.transfer_queue.control.spec import TaskSpec
from harness.transfer_queue.rows.columns import Rows

Positions = NDArray[np.int64]
_COUNTS = ("taken", "acknowledged", "dropped", "_ever_ready", "_settled")
_ARRAYS = ("open", "_missing_cells", "_ready_at", "_weights", "_bounds", "_unsettled")


class TaskProgress:
    """How far a task is with a partition. Counts are in units: rows, or groups where the task wants them whole.

    Times are the caller's, in seconds.

    Seventeen attributes: counts that are kept up to date, so that no request scans the rows.
    """

    def __init__(self, spec: TaskSpec, rows: int, group_size: int) -> None:
        self.spec = spec
        self.unit_rows = group_size if spec.whole_groups else 1
        self.units = rows // self.unit_rows
        self.policy = policy_of(spec.policy)(self.units)
        self.taken = 0
        self.acknowledged = 0
        self.dropped = 0
        self._ever_ready = 0
        self._missing_cells = np.full(self.units, self.unit_rows * len(spec.columns), np.int64)
        self._ready_at = np.full(self.units, np.inf)
        self._settled = 0
        self._unsettled = None if spec.settled_by is None else np.full(self.units, self.unit_rows, np.int64)  # rows
        self._weights: Weights | None = np.zeros(self.units, np.int64) if spec.weight else None
        self.open = np.ones(self.units, bool)  # neither dispatched nor dropped
        self._bounds: NDArray[np.int64] | None = None  # under which each unit is out; there once one was given
        self._following: dict[TaskProgress, _Started] = {}
        self._followed: list[_Started] = []

    @property
    def left(self) -> int:
        """Units that are neither dispatched nor dropped."""
        return self.units - self.taken - self.dropped

    @property
    def finished(self) -> int:
        """Units that will not go out again by themselves."""
        if self._unsettled is not None:
            return self.dropped + self._settled
        return self.dropped + (self.taken if self.spec.lease_s is None else self.acknowledged)

    @property
    def over(self) -> bool:
        """Everything is finished, and everything the task reads was written: also of what was dropped before that."""
        return self.finished == self._ever_ready == self.units

    def fill(self, positions: Positions, columns: int, lengths: Mapping[str, Rows], tick: int, now: float) -> bool:
        """Note that these rows got this many more of the task's columns, among them those that weigh them of which
        `lengths` are there; returns whether a unit became ready by it."""
        units = positions if self.unit_rows == 1 else positions // self.unit_rows
        if self._weights is not None:
            for column in lengths.keys() & self.spec.weighed_by:
                np.add.at(self._weights, units, lengths[column])
        ready = units[self._count_down(units, columns) == 0]
        if not ready.size:
            return False
        if self.unit_rows > 1:
            ready = np.unique(ready)
        self._ever_ready += ready.size
        self._ready_at[ready] = now
        ready = ready[self.open[ready]]
        self.policy.add(ready, tick, self.weights(ready))
        return True

    def _count_down(self, units: Units, cells: int) -> NDArray[np.int64]:
        """Cells still missing of each unit, once so many more of each row are there."""
        if self.unit_rows > 1:
            np.subtract.at(self._missing_cells, units, cells)
            return self._missing_cells[units]
        left = self._missing_cells[units] - cells  # no unit twice
        self._missing_cells[units] = left
        return left

    def settle(self, positions: Positions) -> None:
        """Note that these rows will not begin again."""
        assert self._unsettled is not None
        units = positions // self.unit_rows
        np.subtract.at(self._unsettled, units, 1)
        self._settled += int(np.count_nonzero(self._unsettled[np.unique(units)] == 0))

    def units_of(self, positions: Positions) -> Units:
        """Units that have a row among these, ascending."""
        return np.unique(positions // self.unit_rows)

    def begin_again(self, units: Units) -> None:
        """None of their cells is written any more, and nobody holds them."""
        ready = units[self._missing_cells[units] == 0]
        taken = units[~self.open[units]]
        self._ever_ready -= ready.size
        self.policy.remove(ready[self.open[ready]])
        self._missing_cells[units] = self.unit_rows * len(self.spec.columns)
        self._ready_at[units] = np.inf
        if self._weights is not None:
            self._weights[units] = 0
        self.taken -= taken.size
        self._set_open(taken, True)
        self.stop(units)

    def weights(self, units: Units) -> Weights | None:
        """Weights of these units, int64 [units]; None where the task weighs nothing."""
        return None if self._weights is None else self._weights[units]

    def take(self, least: int, most: int, limit: int, among: Units | None) -> Units | None:
        """Units below `limit` in the policy's order; at the end of the partition the rest, however few. `among`: none
        but these, which need not wait for others, and at their end the rest of them."""
        left = self.left if among is None else among.size
        if not left:
            return None
        if among is None:
            units = self.policy.take(min(least, left), most, limit)
        else:
            units = self._take_among(among, min(least, left), most, limit)
        if units is not None:
            self.taken += units.size
            self._set_open(units, False)
        return units

    def take_named(self, units: Units, limit: int) -> Units | None:
        """Take these units, all of them, if nobody has them and they are ready and below `limit`."""
        open_units = units[self.open[units]]
        if open_units.size < units.size:
            return None
        return self.take(units.size, units.size, limit, units)

    def _take_among(self, among: Units, least: int, most: int, limit: int) -> Units | None:
        units = self.policy.in_order(self.ready_among(among, limit))[:most]
        if units.size < least:
            return None
        self.policy.remove(units)
        return units

    def ready_among(self, among: Units, limit: int) -> Units:
        """Units among these open ones, ascending, that are ready and below `limit`."""
        return among[(among < limit) & (self._missing_cells[among] == 0)]

    def turn(self, limit: int, among: Units | None) -> int:
        """The policy's turn: of several partitions, the one with the lowest is asked first."""
        return self.policy.turn(limit, None if among is None else self.ready_among(among, limit))

    def wait_again(self, units: Units, now: float) -> None:
        """Nobody holds them any more: their wait counts from now on."""
        self._ready_at[units] = now

    def give_back(self, units: Units) -> None:
        """Let these units be taken again."""
        self.taken -= units.size
        self._set_open(units, True)
        self.policy.put_back(units)

    def drop(self, units: Units) -> None:
        """Open units that are not to go out, ready or not."""
        self.dropped += units.size
        self._set_open(units, False)
        self.policy.remove(units)

    def give_up(self, units: Units) -> None:
        """Open units that are not to go out, and of which nothing more is waited for."""
        unready = units[self._missing_cells[units] > 0]
        self._ever_ready += unready.size
        self._missing_cells[unready] = NEVER
        self.drop(units)

    def finish(self, units: Units) -> None:
        """Open units are done with, ready or not, and nobody is handed them."""
        self.taken += units.size
        self.acknowledged += units.size
        self._set_open(units, False)
        self.policy.remove(units)

    def waited(self, units: Units, now: float) -> NDArray[np.float64]:
        """How long each of these units was ready, in seconds."""
        return now - self._ready_at[units]

    def oldest(self) -> float:
        """Time since when the unit that is ready longest waits; infinity where none does."""
        return float(self._ready_at[self.open].min(initial=np.inf))

    def positions(self, units: Units) -> Positions:
        """The rows of these units, as positions in the partition."""
        if self.unit_rows == 1:
            return units
        return (units[:, None] * self.unit_rows + np.arange(self.unit_rows)).ravel()

    # -- to a file and back

    def state(self) -> dict[str, Any]:
        """Plain data and arrays, which are its own: to be encoded at once."""
        return {name: getattr(self, name) for name in _COUNTS + _ARRAYS} | {"policy": self.policy.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """A new one is as far as that one was."""
        for name in _COUNTS + _ARRAYS:
            setattr(self, name, state[name])
        self.policy.restore(state["policy"])

    def shift(self, seconds: float) -> None:
        """The caller's clock was put forward by so much."""
        self._ready_at += seconds

    # -- what another task was handed under a bound

    def start(self, units: Units, bound: int | None) -> None:
        """Note that units are in the hands of a consumer with this bound, or of one without. What was begun under a
        lower one keeps that."""
        if bound is None:
            return
        if self._bounds is None:
            self._bounds = np.full(self.units, NEVER)
        self._bounds[units] = np.minimum(self._bounds[units], bound)
        self._changed(units)

    def stop(self, units: Units) -> None:
        """No consumer holds them any more, and nothing was made of them."""
        if self._bounds is not None:
            self._bounds[units] = NEVER
            self._changed(units)

    def _set_open(self, units: Units, is_open: bool) -> None:
        self.open[units] = is_open
        self._changed(units)

    def _changed(self, units: Units) -> None:
        for started in self._followed:
            started.update(self, units)

    def bounds(self, positions: Positions) -> NDArray[np.int64]:
        """The bound under which the unit of each row is out; NEVER where it is out under none."""
        if self._bounds is None:
            return np.full(positions.size, NEVER)
        return self._bounds[positions // self.unit_rows]

    def started_by(self, other: TaskProgress) -> _Started:
        """Units that are open here, and that `other` was handed under a bound: kept up to date from the first time it
        is asked."""
        if other not in self._following:
            self._following[other] = started = _Started(self, other)
            self._followed.append(started)
            other._followed.append(started)
        return self._following[other]


class _Started:
    """Units that `mine` has still to be handed, by the lowest bound under which `other` was handed a row of them."""

    def __init__(self, mine: TaskProgress, other: TaskProgress) -> None:
        self._mine, self._other = mine, other
        self._bound_of = np.full(mine.units, NEVER)
        self._units: dict[int, set[int]] = {}
        self._refresh(np.arange(mine.units))

    def update(self, whose: TaskProgress, units: Units) -> None:
        """Take note that these units of one of the two changed."""
        if whose is not self._mine:
            units = np.unique(whose.positions(units) // self._mine.unit_rows)
        self._refresh(units)

    def _refresh(self, units: Units) -> None:
        mine = self._mine
        bounds = self._other.bounds(mine.positions(units)).reshape(-1, mine.unit_rows).min(axis=1)
        bounds[~mine.open[units]] = NEVER
        changed = bounds != self._bound_of[units]
        units, bounds = units[changed], bounds[changed]
        before = self._bound_of[units]
        for unit, old, new in zip(units.tolist(), before.tolist(), bounds.tolist(), strict=True):
            if old != NEVER:
                self._units[old].remove(unit)
                if not self._units[old]:
                    del self._units[old]
            if new != NEVER:
                self._units.setdefault(new, set()).add(unit)
        self._bound_of[units] = bounds

    def count(self, below: int) -> int:
        """How many were started under a bound of `below` or less."""
        return sum(len(units) for bound, units in self._units.items() if bound <= below)

    def units(self, below: int) -> Units:
        """Units started under this bound or less, ascending."""
        return np.array(sorted(u for bound, units in self._units.items() if bound <= below for u in units), np.int64)
