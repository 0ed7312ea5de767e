"""The state of one partition: which cells are written (row x column), and how far each task is (row x task)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.transfer_queue.columns import Rows, runs
from harness.transfer_queue.control.policies import NEVER, POLICIES, Units
from harness.transfer_queue.frames import Frame, Part
from harness.transfer_queue.spec import QueueSpec, TaskSpec

Positions = NDArray[np.int64]
UNWRITTEN = -1
_INDEX_BITS = 32  # a slot is (number of the frame) << 32 | (row in the frame)
_INDEX_MASK = (1 << _INDEX_BITS) - 1


class Progress:
    """How far one task is in one partition. Counts are in units: rows, or groups where the task wants them whole."""

    def __init__(self, spec: TaskSpec, rows: int, group_size: int) -> None:
        self.spec = spec
        self.unit_rows = group_size if spec.whole_groups else 1
        self.units = rows // self.unit_rows
        self.policy = POLICIES[spec.policy](self.units)
        self.taken = 0
        self.acknowledged = 0
        self.dropped = 0
        self._ever_ready = 0
        self._missing_cells = np.full(self.units, self.unit_rows * len(spec.columns), np.int64)
        self.open = np.ones(self.units, bool)  # neither handed out nor dropped
        self.changes = 0  # how often `open` or a bound changed
        self._bounds: NDArray[np.int64] | None = None  # under which each unit is out; there once one was given

    @property
    def left(self) -> int:
        """Units that nobody holds or has finished."""
        return self.units - self.taken - self.dropped

    @property
    def finished(self) -> int:
        """Units that will not go out again by themselves."""
        return self.dropped + (self.taken if self.spec.lease_s is None else self.acknowledged)

    @property
    def over(self) -> bool:
        """Everything is finished, and everything the task reads was written: also of what was dropped before that."""
        return self.finished == self._ever_ready == self.units

    def fill(self, positions: Positions, columns: int, tick: int) -> bool:
        """These rows got this many more of the task's columns; whether a unit became ready by it."""
        units = positions // self.unit_rows
        np.subtract.at(self._missing_cells, units, columns)
        ready = units[self._missing_cells[units] == 0]
        if not ready.size:
            return False
        ready = np.unique(ready)
        self._ever_ready += ready.size
        self.policy.add(ready[self.open[ready]], tick)
        return True

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

    def _set_open(self, units: Units, is_open: bool) -> None:
        self.open[units] = is_open
        self.changes += 1

    def _take_among(self, among: Units, least: int, most: int, limit: int) -> Units | None:
        units = self.policy.in_order(self.ready_among(among, limit))[:most]
        if units.size < least:
            return None
        self.policy.remove(units)
        return units

    def ready_among(self, among: Units, limit: int) -> Units:
        """Those of these open units, ascending, that are ready and below `limit`."""
        return among[(among < limit) & (self._missing_cells[among] == 0)]

    def turn(self, limit: int, among: Units | None) -> int:
        """Of several partitions, the one with the lowest turn is asked first."""
        return self.policy.turn(limit, None if among is None else self.ready_among(among, limit))

    def give_back(self, units: Units) -> None:
        self.taken -= units.size
        self._set_open(units, True)
        self.policy.put_back(units)

    def drop(self, units: Units) -> None:
        """Open units that are not to go out, ready or not."""
        self.dropped += units.size
        self._set_open(units, False)
        self.policy.remove(units)

    def start(self, units: Units, bound: int | None) -> None:
        """They are in the hands of a consumer with this bound. None: of one without, or of nobody any more."""
        if self._bounds is None:
            if bound is None:
                return
            self._bounds = np.full(self.units, NEVER)
        self._bounds[units] = NEVER if bound is None else bound
        self.changes += 1

    def started(self, below: int) -> NDArray[np.bool_] | None:
        """bool [units]: in somebody's hands under a bound of `below` or less. None where none is under any bound."""
        return None if self._bounds is None else self._bounds <= below

    def positions(self, units: Units) -> Positions:
        """The rows of these units, as positions in the partition."""
        if self.unit_rows == 1:
            return units
        return (units[:, None] * self.unit_rows + np.arange(self.unit_rows)).ravel()


class Partition:
    """A named set of rows in an order; `rows` int64 [R] may be any different ids, `group_size` of them a group."""

    def __init__(self, name: str, rows: Rows, group_size: int, spec: QueueSpec) -> None:
        self.name = name
        self.rows = rows
        self.group_size = group_size
        self.tasks = {task: Progress(s, rows.size, group_size) for task, s in spec.tasks.items()}
        self._started: dict[tuple[str, str], tuple[tuple[int, int], dict[int, Units]]] = {}  # by tasks; as of, by bound
        self.frames: list[Frame] = []  # what puts brought, numbered as they came
        self.nbytes = 0
        self._slots = {column: np.full(rows.size, UNWRITTEN) for column in spec.columns}  # where each cell lies
        self._order = np.argsort(rows, kind="stable")
        self._sorted = rows[self._order]
        self._highest = np.maximum.accumulate(rows)
        self._mark = np.zeros(rows.size, np.int64)

    def limit(self, task: str, below: int | None) -> int:
        """The first unit that a reader may not have: the one with the first row with an id of `below` or more."""
        progress = self.tasks[task]
        return progress.units if below is None else int(self._highest.searchsorted(below)) // progress.unit_rows

    def started(self, task: str, other: str, below: int) -> Units:
        """The units that `task` is still to be handed, and `other` was handed (of a group: a row) under a bound of
        `below` or less. Looked for once, until either task is handed something here: not to be changed."""
        mine, theirs = self.tasks[task], self.tasks[other]
        now = (mine.changes, theirs.changes)
        as_of, known = self._started.get((task, other), (None, {}))
        if as_of != now:
            known = {}
            self._started[task, other] = (now, known)
        if below not in known:
            known[below] = self._find_started(mine, theirs, below)
        return known[below]

    @staticmethod
    def _find_started(mine: Progress, theirs: Progress, below: int) -> Units:
        started = theirs.started(below)
        if started is None:
            return np.empty(0, np.int64)
        if mine.unit_rows == theirs.unit_rows:
            return np.flatnonzero(started & mine.open)
        rows = np.repeat(started, theirs.unit_rows).reshape(-1, mine.unit_rows)
        return np.flatnonzero(rows.any(axis=1) & mine.open)

    @property
    def over(self) -> bool:
        """Every task has finished every row, and no put of what any of them reads is to come."""
        return all(progress.over for progress in self.tasks.values())

    def find(self, rows: Rows) -> Positions:
        """Where these rows are; ValueError for foreign and doubled ones."""
        at = np.minimum(self._sorted.searchsorted(rows), self.rows.size - 1)
        foreign = rows[self._sorted[at] != rows]
        if foreign.size:
            raise ValueError(f"row {foreign[0]} is not in partition {self.name!r} ({foreign.size} such rows)")
        positions = self._order[at]
        order = np.arange(rows.size)
        self._mark[positions] = order
        if (self._mark[positions] != order).any():  # a later one wrote over it
            raise ValueError(f"a put to partition {self.name!r} names a row twice: {rows.tolist()[:20]}")
        return positions

    def check_unwritten(self, positions: Positions, columns: Iterable[str]) -> None:
        """ValueError if one of these cells was written."""
        for column in columns:
            written = self.rows[positions[self._slots[column][positions] != UNWRITTEN]]
            if written.size:
                raise ValueError(
                    f"column {column!r} of row {written[0]} in partition {self.name!r} is already written "
                    f"({written.size} such rows): a cell is written once"
                )

    def put(self, positions: Positions, frame: Frame, tick: int) -> list[str]:
        """The frame holds these cells; the tasks for which rows became ready, as of this tick."""
        slots = (len(self.frames) << _INDEX_BITS) + np.arange(positions.size)
        for column in frame.sizes:
            self._slots[column][positions] = slots
        self.frames.append(frame)
        self.nbytes += frame.nbytes
        written = set(frame.sizes)
        counts = {task: len(written.intersection(p.spec.columns)) for task, p in self.tasks.items()}
        return [task for task, count in counts.items() if count and self.tasks[task].fill(positions, count, tick)]

    def locate(self, positions: Positions, columns: Iterable[str]) -> tuple[tuple[Frame, ...], tuple[Part, ...]]:
        """The frames in which these cells lie, and which rows of them. Written together, they lie alike: worked out
        once."""
        alike: dict[bytes, tuple[Positions, list[str]]] = {}
        for column in columns:
            slots = self._slots[column][positions]
            alike.setdefault(slots.tobytes(), (slots, []))[1].append(column)
        numbers: dict[int, int] = {}  # of the frame -> in the answer
        parts = []
        for slots, names in alike.values():
            cuts = []
            for start, stop in runs(slots):
                frame, index = start >> _INDEX_BITS, start & _INDEX_MASK
                cuts.append((numbers.setdefault(frame, len(numbers)), index, index + stop - start))
            parts.append(Part(tuple(names), tuple(cuts)))
        return tuple(self.frames[frame] for frame in numbers), tuple(parts)

    def missing(self, task: str) -> dict[str, int]:
        """How many rows lack each column that the task reads; columns that no row lacks are left out."""
        lacking = {c: int((self._slots[c] == UNWRITTEN).sum()) for c in self.tasks[task].spec.columns}
        return {column: count for column, count in lacking.items() if count}

    def depth(self) -> int:
        """Rows with something written that the slowest task has still to finish."""
        begun = int(np.logical_or.reduce([slots != UNWRITTEN for slots in self._slots.values()]).sum())
        return begun - min((p.finished * p.unit_rows for p in self.tasks.values()), default=0)

    def describe(self) -> dict[str, Any]:
        """Counts in rows; see the folder's README for what each means."""
        return {
            "rows": self.rows.size,
            "group_size": self.group_size,
            "bytes": self.nbytes,
            "depth_samples": self.depth(),
            "written": {column: int((slots != UNWRITTEN).sum()) for column, slots in self._slots.items()},
            "tasks": {task: self._describe_task(task, p) for task, p in self.tasks.items()},
        }

    def _describe_task(self, task: str, progress: Progress) -> dict[str, Any]:
        return {
            "ready": len(progress.policy) * progress.unit_rows,
            "handed_out": progress.taken * progress.unit_rows,
            "done": (progress.finished - progress.dropped) * progress.unit_rows,
            "dropped": progress.dropped * progress.unit_rows,
            "depth": progress.left * progress.unit_rows,
            "missing": self.missing(task),
        }
