"""The live partitions: which cells are written (row x column), and how far each task is (row x task)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.transfer_queue.control.policies import Units
from harness.transfer_queue.control.progress import Positions, TaskProgress
from harness.transfer_queue.control.spec import GetRequest, QueueSpec
from harness.transfer_queue.rows.columns import Rows, as_integers, runs
from harness.transfer_queue.rows.frames import Frame, Part

UNWRITTEN = -1
_UNWRITTEN_BYTES = np.int64(UNWRITTEN).tobytes()  # of few cells bytes are compared in a tenth of NumPy's time
_INDEX_BITS = 32  # a slot is (number of the frame) << 32 | (row in the frame)
_INDEX_MASK = (1 << _INDEX_BITS) - 1


class Partition:
    """A named set of rows in an order; `rows` int64 [R] may be any different ids, `group_size` of them a group.

    Sixteen attributes: half of them are counts that puts keep up to date, so that no request scans the rows.
    """

    def __init__(self, name: str, rows: Rows, group_size: int, spec: QueueSpec) -> None:
        self.name = name
        self.rows = rows
        self.group_size = group_size
        self.tasks = {task: TaskProgress(s, rows.size, group_size) for task, s in spec.tasks.items()}
        self.frames: list[Frame] = []  # what puts brought, numbered as they came
        self.nbytes = 0
        self.column_bytes = dict.fromkeys(spec.columns, 0)
        self._slots = {column: np.full(rows.size, UNWRITTEN) for column in spec.columns}  # where each cell lies
        self._written = dict.fromkeys(spec.columns, 0)  # rows
        self._begun = np.zeros(rows.size, bool)  # something is written
        self._begun_rows = 0
        self._order = None if (rows[1:] > rows[:-1]).all() else np.argsort(rows, kind="stable")
        self._sorted = rows if self._order is None else rows[self._order]
        self._highest = np.maximum.accumulate(rows)
        self._settling = [(s.settled_by, task) for task, s in spec.tasks.items() if s.settled_by is not None]
        self._readers: dict[tuple[str, ...], list[tuple[str, TaskProgress, int]]] = {}

    def limit(self, task: str, below: int | None) -> int:
        """The first unit that a reader may not have: the one with the first row with an id of `below` or more."""
        progress = self.tasks[task]
        return progress.units if below is None else int(self._highest.searchsorted(below)) // progress.unit_rows

    def from_id(self, task: str, units: Units | None, above: int) -> Units | None:
        """Open units, of these (None: of all), whose rows have ids of `above` or more; None if that is all."""
        if not above:
            return units
        lowest = self.limit(task, above)
        if units is None:
            return np.flatnonzero(self.tasks[task].open[lowest:]) + lowest
        return units[units >= lowest]

    def first_open(self, task: str) -> int:
        """The id of the first row that is neither dispatched to the task nor dropped, of which there is one."""
        progress = self.tasks[task]
        return int(self.rows[progress.unit_rows * int(progress.open.argmax())])

    def started(self, task: str, other: str, below: int) -> Units:
        """The units that `task` is still to be handed, and `other` was handed (of a group: a row) under a bound of
        `below` or less."""
        return self.tasks[task].started_by(self.tasks[other]).units(below)

    def count_started(self, task: str, other: str, below: int) -> int:
        """How many units `started` would name."""
        return self.tasks[task].started_by(self.tasks[other]).count(below)

    @property
    def over(self) -> bool:
        """Every task has finished every row, and no put of what any of them reads is to come."""
        return all(progress.over for progress in self.tasks.values())

    @property
    def gives_way(self) -> bool:
        """Whether all tasks that somebody waits for are so."""
        return all(progress.over for progress in self.tasks.values() if not progress.spec.background)

    def has(self, row: int) -> bool:
        """Whether a row is in it."""
        at = int(self._sorted.searchsorted(row))
        return at < self.rows.size and bool(self._sorted[at] == row)

    def among(self, rows: Rows) -> Rows:
        """Filter these rows by whether they are here, in their order."""
        return rows[self._sorted[np.minimum(self._sorted.searchsorted(rows), self.rows.size - 1)] == rows]

    def find(self, rows: Rows) -> Positions:
        """Positions of these rows; ValueError for foreign and doubled ones."""
        at = self._sorted.searchsorted(rows)
        nearest = self._sorted.take(at, mode="clip")
        if nearest.tobytes() != rows.tobytes():
            foreign = rows[nearest != rows]
            raise ValueError(f"row {foreign[0]} is not in partition {self.name!r} ({foreign.size} such rows)")
        if len(set(rows.tolist())) < rows.size:
            raise ValueError(f"a put to partition {self.name!r} names a row twice: {rows.tolist()[:20]}")
        return at if self._order is None else self._order[at]

    def check_unwritten(self, positions: Positions, columns: Iterable[str]) -> None:
        """ValueError if one of these cells was written."""
        unwritten = _UNWRITTEN_BYTES * positions.size
        for column in columns:
            slots = self._slots[column][positions]
            if slots.tobytes() != unwritten:
                rows = self.rows[positions[slots != UNWRITTEN]]
                raise ValueError(
                    f"column {column!r} of row {rows[0]} in partition {self.name!r} is already written "
                    f"({rows.size} such rows): a cell is written once"
                )

    def unfinished(self, task: str, units: Units) -> Positions:
        """The rows of these units that lack something that the task writes; all, if it does not say what it writes."""
        progress = self.tasks[task]
        positions = progress.positions(units)
        return positions[self.lacking(positions, progress.spec.writes)] if progress.spec.writes else positions

    def unfinished_units(self, task: str, units: Units) -> tuple[Units, Units]:
        """Units with a row that is unfinished; and those of them of which no row is finished."""
        progress = self.tasks[task]
        if not progress.spec.writes:
            return units, units
        lacking = self.lacking(progress.positions(units), progress.spec.writes).reshape(-1, progress.unit_rows)
        return units[lacking.any(axis=1)], units[lacking.all(axis=1)]

    def lacking(self, positions: Positions, columns: Iterable[str]) -> NDArray[np.bool_]:
        """Rows, of these, that lack one of the columns: bool."""
        return np.any([self._slots[column][positions] == UNWRITTEN for column in columns], axis=0)

    def put(self, positions: Positions, frame: Frame, lengths: Mapping[str, Rows], tick: int, now: float) -> list[str]:
        """The frame holds these cells; the tasks for which rows became ready, as of this tick and time. lengths: those
        of the columns that some task weighs rows by."""
        first = len(self.frames) << _INDEX_BITS
        slots = np.arange(first, first + positions.size)
        for column, size in frame.sizes.items():
            self._slots[column][positions] = slots
            self.column_bytes[column] += size
            self._written[column] += positions.size
        self._begun_rows += self._begun[positions].tobytes().count(0)
        self._begun[positions] = True
        self.frames.append(frame)
        self.nbytes += frame.nbytes
        settled = [task for column, task in self._settling if column in frame.sizes]
        for task in settled:
            self.tasks[task].settle(positions)
        return settled + [
            task
            for task, progress, columns in self._readers_of(tuple(frame.sizes))
            if progress.fill(positions, columns, lengths, tick, now)
        ]

    def _check_whole_groups(self, positions: Positions, what: str) -> None:
        _, counts = np.unique(positions // self.group_size, return_counts=True)
        if (counts < self.group_size).any():
            raise ValueError(
                f"rows of partition {self.name!r} {what} in whole groups of {self.group_size}, "
                f"not {self.rows[positions].tolist()[:20]}"
            )

    def check_unsettled(self, positions: Positions) -> None:
        """ValueError where these rows cannot begin again: not whole groups, settled, or of a task with leases."""
        self._check_whole_groups(positions, "begin again")
        for task, progress in self.tasks.items():
            if progress.spec.lease_s is not None or progress.spec.ranks > 1:
                taken = progress.units_of(positions)
                if not progress.open[taken].all():
                    raise ValueError(f"rows of partition {self.name!r} cannot begin again: task {task!r} has them")
            if (column := progress.spec.settled_by) is not None:
                written = self._slots[column][positions] != UNWRITTEN
                if written.any():
                    row = self.rows[positions[written]][0]
                    raise ValueError(f"row {row} of partition {self.name!r} has {column!r}: it cannot begin again")

    def give_up(self, positions: Positions) -> None:
        """Tasks that are settled by no column are handed these rows no more, and wait for nothing of them. ValueError,
        and nothing changed, for what is no whole group, or was handed out."""
        self._check_whole_groups(positions, "are given up")
        of_tasks = [
            (task, progress, progress.units_of(positions))
            for task, progress in self.tasks.items()
            if progress.spec.settled_by is None
        ]
        for task, progress, units in of_tasks:
            if not progress.open[units].all():
                raise ValueError(f"rows of partition {self.name!r} cannot be given up: task {task!r} has, or had, them")
        for _, progress, units in of_tasks:
            progress.give_up(units)

    def finish(self, task: str, positions: Positions) -> None:
        """The task is done with these rows. ValueError, and nothing changed, for what is no whole group where it takes
        such, or was handed out."""
        progress = self.tasks[task]
        if progress.unit_rows > 1:
            self._check_whole_groups(positions, "are finished")
        units = progress.units_of(positions)
        if not progress.open[units].all():
            raise ValueError(f"rows of partition {self.name!r} cannot be finished: task {task!r} has, or had, them")
        progress.finish(units)

    def begin_again(self, positions: Positions) -> None:
        """Reset these rows as if nothing had ever been written of them, and nobody had been handed them. What was
        written stays in memory with the partition."""
        for column, slots in self._slots.items():
            self._written[column] -= int(np.count_nonzero(slots[positions] != UNWRITTEN))
            slots[positions] = UNWRITTEN
        self._begun_rows -= int(np.count_nonzero(self._begun[positions]))
        self._begun[positions] = False
        for progress in self.tasks.values():
            progress.begin_again(progress.units_of(positions))

    def _readers_of(self, columns: tuple[str, ...]) -> list[tuple[str, TaskProgress, int]]:
        """The tasks that read some of these columns, and how many of them. Worked out once."""
        if columns not in self._readers:
            counts = {task: sum(c in columns for c in p.spec.columns) for task, p in self.tasks.items()}
            self._readers[columns] = [(task, self.tasks[task], count) for task, count in counts.items() if count]
        return self._readers[columns]

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

    def state(self) -> dict[str, Any]:
        """All but the frames, as plain data and arrays, which are its own: to be encoded at once."""
        return {
            "name": self.name,
            "rows": self.rows,
            "group_size": self.group_size,
            "slots": self._slots,
            "begun": self._begun,
            "tasks": {task: progress.state() for task, progress in self.tasks.items()},
        }

    def restore(self, state: dict[str, Any], frames: Sequence[Frame]) -> None:
        """A new one of the same rows holds the same cells, and its tasks are as far."""
        self.frames = list(frames)
        self.nbytes = sum(frame.nbytes for frame in frames)
        self._slots = state["slots"]
        for column, slots in self._slots.items():
            self.column_bytes[column] = sum(frame.sizes.get(column, 0) for frame in frames)
            self._written[column] = int((slots != UNWRITTEN).sum())
        self._begun = state["begun"]
        self._begun_rows = int(self._begun.sum())
        for task, progress in self.tasks.items():
            progress.restore(state["tasks"][task])

    def missing(self, task: str) -> dict[str, int]:
        """How many rows lack each column that the task reads; columns that no row lacks are left out."""
        lacking = {c: self.rows.size - self._written[c] for c in self.tasks[task].spec.columns}
        return {column: count for column, count in lacking.items() if count}

    def depth(self) -> int:
        """Rows with something written that the slowest task has still to finish."""
        waited_for = (p for p in self.tasks.values() if not p.spec.background)
        return self._begun_rows - min((p.finished * p.unit_rows for p in waited_for), default=0)

    def describe(self) -> dict[str, Any]:
        """Counts in rows; see the folder's README for what each means."""
        return {
            "rows": self.rows.size,
            "group_size": self.group_size,
            "bytes": self.nbytes,
            "depth_samples": self.depth(),
            "written": dict(self._written),
            "column_bytes": dict(self.column_bytes),
            "tasks": {task: self._describe_task(task, p) for task, p in self.tasks.items()},
        }

    def _describe_task(self, task: str, progress: TaskProgress) -> dict[str, Any]:
        return {
            "ready": len(progress.policy) * progress.unit_rows,
            "handed_out": progress.taken * progress.unit_rows,
            "done": (progress.finished - progress.dropped) * progress.unit_rows,
            "dropped": progress.dropped * progress.unit_rows,
            "depth": progress.left * progress.unit_rows,
            "missing": self.missing(task),
        }


class Partitions:
    """The live partitions in creation order. rows: of those that take room; nbytes: what all of them hold."""

    def __init__(self, spec: QueueSpec) -> None:
        self._spec = spec
        self._live: dict[str, Partition] = {}
        self._cleared: set[str] = set()
        self._gave_way: set[str] = set()
        self.rows = 0
        self.nbytes = 0

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._live.values())

    def __contains__(self, name: str | None) -> bool:
        return name in self._live

    def was_cleared(self, name: str | None) -> bool:
        """Whether a partition of this name was cleared."""
        return name in self._cleared

    def asked(self, name: str | None) -> Iterable[Partition]:
        """The partition of this name, if it lives; None: all."""
        if name is None:
            return self._live.values()
        return [self._live[name]] if name in self._live else []

    def holding(self, row: int) -> Partition | None:
        """The oldest that has this row."""
        return next((partition for partition in self if partition.has(row)), None)

    def check_new(self, name: str, rows: Iterable[int], group_size: int) -> Rows:
        """The rows of a partition that can be created once there is room; ValueError if it never can."""
        ids = as_integers(rows, "rows").copy()
        cap = self._spec.capacity_rows
        if name in self._live or name in self._cleared:
            raise ValueError(f"partition {name!r} exists or was cleared: a name is used once")
        if not ids.size or np.unique(ids).size < ids.size:
            raise ValueError(f"partition {name!r} needs one or more different rows, not {ids.tolist()[:20]}")
        if group_size < 1 or ids.size % group_size:
            raise ValueError(f"partition {name!r} has {ids.size} rows, which are not whole groups of {group_size}")
        if cap is not None and ids.size > cap:
            raise ValueError(f"partition {name!r} has {ids.size} rows, more than capacity_rows={cap}")
        return ids

    def create(self, name: str, rows: Rows, group_size: int) -> None:
        """Add a partition of these rows."""
        self._live[name] = Partition(name, rows, group_size, self._spec)
        self.rows += rows.size

    def give_way(self, name: str) -> None:
        """Count a partition, which lives on, as one that takes no room any more."""
        if name not in self._gave_way:
            self._gave_way.add(name)
            self.rows -= self._live[name].rows.size

    def forget(self, name: str) -> None:
        """Remove a partition that was cleared."""
        self.give_way(name)
        self._gave_way.remove(name)
        partition = self._live.pop(name)
        self._cleared.add(name)
        self.nbytes -= partition.nbytes

    def state(self) -> dict[str, Any]:
        """Plain data and arrays, which are its own: to be encoded at once."""
        return {"live": [partition.state() for partition in self], "cleared": list(self._cleared)}

    def restore(self, state: dict[str, Any], frames: Mapping[str, Sequence[Frame]]) -> None:
        """New ones go on as those were. frames: by partition."""
        self._cleared = set(state["cleared"])
        for one in state["live"]:
            self.create(one["name"], one["rows"], one["group_size"])
            partition = self._live[one["name"]]
            partition.restore(one, frames.get(partition.name, ()))
            self.nbytes += partition.nbytes

    def shift(self, seconds: float) -> None:
        """The caller's clock was put forward by so much."""
        for progress in [progress for partition in self for progress in partition.tasks.values()]:
            progress.shift(seconds)

    def __getitem__(self, name: str) -> Partition:
        """ValueError if there is none of this name, which says whether there was."""
        if name not in self._live:
            why = "was cleared" if name in self._cleared else f"is unknown; there are {list(self._live)}"
            raise ValueError(f"partition {name!r} {why}")
        return self._live[name]


class Precedence(NamedTuple):
    """A limit of so many rows a rank and, where `units` (by partition) are named, to these alone: all that is left of
    what was started under a bound of `below` or less."""

    at_most: int
    below: int | None = None
    units: Mapping[str, Units] = MappingProxyType({})


def precedence(request: GetRequest, asked: Sequence[Partition], dispatched: int) -> Precedence:
    """asked: the partitions that rows may come from; dispatched: rows that the task was handed so far.

    The slack of a pair (below, by) is how many other rows may still go before all that was started under `below`. What
    a lower bound started, a higher one includes: so units of the first pair without slack cost nothing but the slack
    of the pairs before it, which limits how many go at once.
    """
    if request.first is None:
        return Precedence(request.count)
    other, pairs = request.first
    progress = [p.tasks[request.task] for p in asked]
    unit = max((p.unit_rows for p in progress if p.left), default=1)

    def waiting(below: int) -> int:
        counts = (partition.count_started(request.task, other, below) for partition in asked)
        return sum(count * p.unit_rows for count, p in zip(counts, progress, strict=True))

    at_most, below = limit(pairs, dispatched, request.count, waiting, unit)
    if below is None:
        return Precedence(at_most)
    started = {p.name: p.started(request.task, other, below) for p in asked}
    return Precedence(at_most, below, {name: units for name, units in started.items() if units.size})


def limit(
    pairs: Iterable[tuple[int, int]], dispatched: int, at_most: int, waiting: Callable[[int], int], unit: int = 1
) -> tuple[int, int | None]:
    """How many may go, and the bound of those that alone may, if any: what waits under the first bound that leaves no
    slack for another unit. pairs: (below, by), bounds ascending; dispatched: what went so far; waiting: what was
    started under a bound and is still to go."""
    for below, by in pairs:
        left = waiting(below)
        slack = by - dispatched - left
        if left and slack < unit:
            return at_most, below
        if left:
            at_most = min(at_most, slack)
    return at_most, None
