"""The state of one partition: which cells are written (row x column), and how far each task is (row x task)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.transfer_queue.columns import Rows
from harness.transfer_queue.policies import POLICIES, Units
from harness.transfer_queue.spec import QueueSpec, TaskSpec

Positions = NDArray[np.int64]


class Progress:
    """How far one task is in one partition. Counts are in units: rows, or groups where the task wants them whole."""

    def __init__(self, spec: TaskSpec, rows: int, group_size: int) -> None:
        self.spec = spec
        self.unit_rows = group_size if spec.whole_groups else 1
        self.units = rows // self.unit_rows
        self.policy = POLICIES[spec.policy](self.units)
        self.taken = 0
        self.acknowledged = 0
        self._missing_cells = np.full(self.units, self.unit_rows * len(spec.columns), np.int64)

    @property
    def left(self) -> int:
        """Units that nobody holds or has finished."""
        return self.units - self.taken

    @property
    def finished(self) -> int:
        """Units that will not go out again by themselves."""
        return self.taken if self.spec.lease_s is None else self.acknowledged

    def fill(self, positions: Positions, columns: int) -> bool:
        """These rows got this many more of the task's columns; whether a unit became ready by it."""
        units = positions
        if self.unit_rows == 1:
            self._missing_cells[units] -= columns
        else:
            units, rows = np.unique(positions // self.unit_rows, return_counts=True)
            self._missing_cells[units] -= rows * columns
        ready = units[self._missing_cells[units] == 0]
        self.policy.add(ready)
        return bool(ready.size)

    def take(self, least: int, most: int, limit_row: int) -> Units | None:
        """Units in the policy's order, none with a row at or beyond position `limit_row`; at the end of the partition
        the rest, however few."""
        if not self.left:
            return None
        units = self.policy.take(min(least, self.left), most, limit_row // self.unit_rows)
        if units is not None:
            self.taken += units.size
        return units

    def give_back(self, units: Units) -> None:
        self.taken -= units.size
        self.policy.add(units)

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
        # A cell is claimed when a put begins to store it, ready when it is stored: two puts cannot both write it.
        self._claimed = {column: np.zeros(rows.size, bool) for column in spec.columns}
        self._ready = {column: np.zeros(rows.size, bool) for column in spec.columns}
        self._order = np.argsort(rows, kind="stable")
        self._sorted = rows[self._order]
        self._highest = np.maximum.accumulate(rows)

    def limit_row(self, below: int | None) -> int:
        """The first position that a reader may not have: from the first row with an id of `below` or more."""
        return self.rows.size if below is None else int(np.searchsorted(self._highest, below))

    def claim(self, rows: Rows, columns: Iterable[str]) -> Positions:
        """Reserve cells for a put; ValueError, and nothing reserved, for foreign or doubled rows and written cells."""
        at = np.minimum(np.searchsorted(self._sorted, rows), self.rows.size - 1)
        foreign = rows[self._sorted[at] != rows]
        if foreign.size:
            raise ValueError(f"row {foreign[0]} is not in partition {self.name!r} ({foreign.size} such rows)")
        positions = self._order[at]
        if np.unique(positions).size < rows.size:
            raise ValueError(f"a put to partition {self.name!r} names a row twice: {rows.tolist()[:20]}")
        for column in columns:
            written = rows[self._claimed[column][positions]]
            if written.size:
                raise ValueError(
                    f"column {column!r} of row {written[0]} in partition {self.name!r} is already written "
                    f"({written.size} such rows): a cell is written once"
                )
        for column in columns:
            self._claimed[column][positions] = True
        return positions

    def unclaim(self, positions: Positions, columns: Iterable[str]) -> None:
        for column in columns:
            self._claimed[column][positions] = False

    def commit(self, positions: Positions, columns: Iterable[str]) -> list[str]:
        """The claimed cells are stored; the tasks for which rows became ready."""
        for column in columns:
            self._ready[column][positions] = True
        counts = {task: len(set(columns) & set(p.spec.columns)) for task, p in self.tasks.items()}
        return [task for task, count in counts.items() if count and self.tasks[task].fill(positions, count)]

    def missing(self, task: str) -> dict[str, int]:
        """How many rows lack each column that the task reads; columns that no row lacks are left out."""
        lacking = {c: self.rows.size - int(self._ready[c].sum()) for c in self.tasks[task].spec.columns}
        return {column: count for column, count in lacking.items() if count}

    def depth(self) -> int:
        """Rows with something written that the slowest task has still to finish."""
        begun = int(np.logical_or.reduce(list(self._ready.values())).sum())
        return begun - min((p.finished * p.unit_rows for p in self.tasks.values()), default=0)

    def describe(self) -> dict[str, Any]:
        """Counts in rows; see the folder's README for what each means."""
        return {
            "rows": self.rows.size,
            "group_size": self.group_size,
            "depth_samples": self.depth(),
            "written": {column: int(ready.sum()) for column, ready in self._ready.items()},
            "tasks": {task: self._describe_task(task, p) for task, p in self.tasks.items()},
        }

    def _describe_task(self, task: str, progress: Progress) -> dict[str, Any]:
        return {
            "ready": len(progress.policy) * progress.unit_rows,
            "handed_out": progress.taken * progress.unit_rows,
            "done": progress.finished * progress.unit_rows,
            "depth": progress.left * progress.unit_rows,
            "missing": self.missing(task),
        }
