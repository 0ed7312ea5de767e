"""How cells lie in memory: the packed buffers of one put, and which parts of them a micro-batch is made of."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.transfer_queue.rows.columns import Column, ColumnSpec, Ragged, Rows, concatenated

Buffer = NDArray[np.uint8]
Place = tuple[int, int] | bytes | dict[str, Any]
"""The place where a storage keeps a frame: (unit, key), whose meaning is the storage's; or its buffers themselves, back
to back; or, within one process, its columns by name."""

_LENGTH = np.dtype(np.int64)


class Frame(NamedTuple):
    """The payload of one put: for each column one packed buffer of so many bytes, in this order.

    A dense column's buffer is its values, row by row. A ragged one's is int64 lengths [rows], then the
    values back to back. It travels as it is, as its parts do.
    """

    rows: int
    sizes: dict[str, int]
    place: Place

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(self.sizes.values())

    def check(self, specs: Mapping[str, ColumnSpec]) -> None:
        """ValueError unless every column is known and its buffer can hold this many rows: what a frame from another
        process claims is not believed."""
        for name, size in self.sizes.items():
            if name not in specs:
                raise ValueError(f"column {name!r} is unknown; the schema has {sorted(specs)}")
            specs[name].check_size(name, self.rows, size)
        if not isinstance(self.place, bytes | tuple):
            raise ValueError("a frame with its columns stays in its process")
        if isinstance(self.place, tuple) and self.place[1] < 0:
            raise ValueError(f"a frame lies at {self.place[1]}")
        if isinstance(self.place, bytes) and len(self.place) != self.nbytes:
            raise ValueError(f"a frame of {self.nbytes} bytes came with {len(self.place)}")


class Part(NamedTuple):
    """Columns of a micro-batch that lie alike: its rows are the rows start to stop of frame f, run after run."""

    columns: tuple[str, ...]
    runs: tuple[tuple[int, int, int], ...]
    """(f, start, stop)"""


class BatchAssignment(NamedTuple):
    """A micro-batch before it is read: rows int64 [k] in the reader's hands, and where their cells lie."""

    lease: int
    partition: str
    rows: Rows
    frames: tuple[Frame, ...]
    parts: tuple[Part, ...]


def pack(column: Column) -> list[np.ndarray]:
    """The arrays that make up a column's buffer, one after the other; views, where the column is contiguous."""
    if isinstance(column, Ragged):
        return [np.ascontiguousarray(column.lengths), np.ascontiguousarray(column.values)]
    return [np.ascontiguousarray(column)]


def in_one_piece(arrays: Sequence[np.ndarray]) -> Buffer:
    """The buffer that these arrays make up; a view, where there is only one."""
    pieces = [array.reshape(-1).view(np.uint8) for array in arrays]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def unpack(buffer: Buffer, spec: ColumnSpec, rows: int) -> Column:
    """The column that a buffer holds, as views of it. ValueError where the buffer does not hold what it says."""
    if not spec.ragged:
        return buffer.view(spec.dtype).reshape(rows, *spec.shape)
    head = rows * _LENGTH.itemsize
    return Ragged(buffer[head:].view(spec.dtype), buffer[:head].view(_LENGTH))


def assemble(
    assignment: BatchAssignment, buffers: Mapping[tuple[int, str], Buffer], specs: Mapping[str, ColumnSpec]
) -> dict[str, Column]:
    """The columns of a micro-batch, from the buffers of its frames by (frame, column).

    Columns whose rows lie in one stretch of one frame are views of its buffer; the others are copied together.
    """
    return {
        name: joined(
            [
                cut(unpack(buffers[f, name], specs[name], assignment.frames[f].rows), start, stop)
                for f, start, stop in part.runs
            ],
            specs[name],
        )
        for part in assignment.parts
        for name in part.columns
    }


def cut(column: Column, start: int, stop: int) -> Column:
    """Rows start to stop, as a view."""
    if not isinstance(column, Ragged):
        return column[start:stop]
    if (start, stop) == (0, len(column)):
        return column
    offsets = column.offsets
    return Ragged(column.values[offsets[start] : offsets[stop]], column.lengths[start:stop])


def joined(pieces: Sequence[Column], spec: ColumnSpec) -> Column:
    """All rows of the pieces, one after the other: copied, unless there is only one."""
    return concatenated(pieces) if pieces else spec.empty()
