"""The base of storages that keep frames in numbered units elsewhere: servers, actors.

A backend of this kind only says what a unit is; a partition spreads over all of them, frame by frame.
"""

import asyncio
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from harness.transfer_queue.rows.columns import Column, ColumnSpec, Ragged
from harness.transfer_queue.rows.frames import BatchAssignment, Buffer, Frame, assemble, in_one_piece, pack
from harness.transfer_queue.storage.inline import inline, inline_buffers


class FrameColumn(NamedTuple):
    """The buffer of one column of a frame; number: the frame's, size: in bytes."""

    number: int
    column: str
    size: int


class Unit(Protocol):
    """One of them, as one process of one queue sees it. Any call may fail, with an error that names the unit, and none
    waits for ever."""

    @property
    def name(self) -> str:
        """The name for errors."""

    def store(self, partition: str, number: int, buffers: Mapping[str, Buffer]) -> None:
        """Keep a frame's buffers by column."""

    def load(self, partition: str, cells: Sequence[FrameColumn]) -> Sequence[Buffer | None]:
        """Load cells in one call. None for what is not there."""

    def forget(self, partition: str, number: int, columns: Collection[str]) -> None:
        """Forget columns of a frame."""

    def drop(self, partitions: Collection[str]) -> None:
        """All frames of these, also those that were never announced; nothing to do if there are none."""

    def clear(self) -> None:
        """All frames of the queue."""

    def close(self) -> None:
        """Let go of what this process holds."""


class UnitStorage:
    """A writer's and reader's side."""

    waits = True

    def __init__(self, units: Sequence[Unit], writer: int, inline_bytes: int) -> None:
        self._units = units
        self._writer = writer
        self._inline_bytes = inline_bytes
        self._count = itertools.count()

    def write(self, partition: str, columns: Mapping[str, Column]) -> Frame:
        rows = len(next(iter(columns.values()), ()))
        arrays = {name: pack(column) for name, column in columns.items()}
        if sum([array.nbytes for some in arrays.values() for array in some]) <= self._inline_bytes:
            return inline(arrays, rows)
        buffers = {name: in_one_piece(some) for name, some in arrays.items()}
        count = next(self._count)
        unit, number = (self._writer + count) % len(self._units), self._writer << 32 | count
        self._units[unit].store(partition, number, buffers)
        return Frame(rows, {name: buffer.size for name, buffer in buffers.items()}, (unit, number))

    def read(self, assignment: BatchAssignment, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        found: dict[tuple[int, str], Buffer] = {}
        wanted: dict[int, list[tuple[int, str]]] = {}
        for f, names in _needed(assignment).items():
            frame = assignment.frames[f]
            if isinstance(frame.place, tuple):
                wanted.setdefault(frame.place[0], []).extend((f, name) for name in names)
            else:
                found |= {(f, name): buffer for name, buffer in inline_buffers(frame).items()}
        for unit, keys in wanted.items():
            cells = [_cell(assignment.frames[f], name) for f, name in keys]
            found |= zip(keys, _load(self._units, unit, assignment.partition, cells), strict=True)
        return {name: _owned(column) for name, column in assemble(assignment, found, specs).items()}

    def discard(self, partition: str, frame: Frame) -> None:
        if isinstance(frame.place, tuple):
            unit, number = frame.place
            self._units[unit].forget(partition, number, frame.sizes)

    def close(self) -> None:
        for unit in self._units:
            unit.close()


class UnitStore:
    """The control plane's side. Units drop in a thread, as no put may wait for them; what one could not drop is
    tried again with the next drop."""

    pinned = False

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._dropping = ThreadPoolExecutor(1, "drop")
        self._due: list[set[str]] = [set() for _ in units]  # the thread's: partitions to drop, by unit

    def drop(self, partition: str) -> None:
        for unit, due in zip(self._units, self._due, strict=True):
            self._dropping.submit(_drop, unit, due, partition)

    async def fetch(self, partition: str, frame: Frame) -> dict[str, Buffer]:
        assert isinstance(frame.place, tuple)
        cells = [_cell(frame, name) for name in frame.sizes]
        found = await asyncio.to_thread(_load, self._units, frame.place[0], partition, cells)
        return dict(zip(frame.sizes, found, strict=True))

    def close(self) -> None:
        """Raises for the first unit that cannot be cleared."""
        self._dropping.shutdown()
        try:
            for unit in self._units:
                unit.clear()
        finally:
            for unit in self._units:
                unit.close()


def _drop(unit: Unit, due: set[str], partition: str) -> None:
    due.add(partition)
    unit.drop(due)
    due.clear()


def _needed(assignment: BatchAssignment) -> dict[int, list[str]]:
    """The columns to be read of each frame, by its index in the assignment."""
    needed: dict[int, list[str]] = {}
    for part in assignment.parts:
        for f in dict.fromkeys(f for f, _, _ in part.runs):
            needed.setdefault(f, []).extend(part.columns)
    return needed


def _cell(frame: Frame, column: str) -> FrameColumn:
    assert isinstance(frame.place, tuple)
    return FrameColumn(frame.place[1], column, frame.sizes[column])


def _load(units: Sequence[Unit], unit: int, partition: str, cells: Sequence[FrameColumn]) -> Iterable[Buffer]:
    """RuntimeError unless the unit has all of them, in their sizes."""
    if not 0 <= unit < len(units):
        raise ValueError(f"a frame of partition {partition!r} is said to lie in unit {unit} of {len(units)}")
    found = units[unit].load(partition, cells)
    return [_whole(buffer, cell, units[unit], partition) for buffer, cell in zip(found, cells, strict=True)]


def _whole(buffer: Buffer | None, cell: FrameColumn, unit: Unit, partition: str) -> Buffer:
    if buffer is None or buffer.size != cell.size:
        has = "nothing" if buffer is None else f"{buffer.size} bytes"
        raise RuntimeError(
            f"{unit.name} has {has} of the {cell.size} bytes of column {cell.column!r} in partition {partition!r}: "
            "it was restarted or emptied, or they expired"
        )
    return buffer


def _owned(column: Column) -> Column:
    """The reader's own: what lies in a unit's read-only memory is copied."""
    values = column.values if isinstance(column, Ragged) else column
    return column if values.flags.writeable else column.copy()
