"""Columns of the queue, dense and ragged, their schema, and the micro-batch that a reader gets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    import torch

_FEW = 64

Rows = NDArray[np.int64]
Dense = np.ndarray
"""[rows, *shape]: one value (or one array of a fixed shape) a row."""


@dataclass(slots=True)  # not frozen: that makes one three times as slowly
class Ragged:
    """Rows of different lengths, packed back to back without padding.

    values: any dtype [sum(lengths)]; lengths: int64 [rows]. Raises ValueError where the two do not fit together.
    """

    values: np.ndarray
    lengths: NDArray[np.int64]

    def __post_init__(self) -> None:
        self.lengths = lengths = as_integers(self.lengths, "lengths")
        least, total = _least_and_sum(lengths)
        if self.values.ndim != 1 or least < 0 or total != self.values.size:
            raise ValueError(
                f"a ragged column needs 1-D values of sum(lengths) items: values are {list(self.values.shape)}, "
                f"lengths sum to {total}"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], dtype: DTypeLike | None = None) -> Ragged:
        """Pack one 1-D array a row; dtype is that of the rows unless given (needed where there are none)."""
        packed = np.concatenate(rows) if len(rows) else np.empty(0)
        values = packed if dtype is None else packed.astype(dtype, copy=False)
        return cls(values, np.fromiter(map(len, rows), np.int64, len(rows)))

    @property
    def offsets(self) -> NDArray[np.int64]:
        """int64 [rows + 1]: row i is values[offsets[i]:offsets[i + 1]]."""
        offsets = np.zeros(self.lengths.size + 1, np.int64)
        self.lengths.cumsum(out=offsets[1:])
        return offsets

    def __len__(self) -> int:
        return self.lengths.size

    @property
    def nbytes(self) -> int:
        """Bytes of values and lengths."""
        return self.values.nbytes + self.lengths.nbytes

    def row(self, i: int) -> np.ndarray:
        """The values of row i [lengths[i]], a view."""
        start = int(self.lengths[:i].sum())
        return self.values[start : start + int(self.lengths[i])]

    def rows(self) -> list[np.ndarray]:
        """Every row, as views."""
        return [self.values[start:end] for start, end in pairwise(self.offsets.tolist())]

    def copy(self) -> Ragged:
        """The same rows, in memory of their own."""
        return Ragged(self.values.copy(), self.lengths.copy())

    def take(self, rows: NDArray[np.integer] | Sequence[int]) -> Ragged:
        """A copy of these rows, in this order; indices count from 0."""
        rows = np.asarray(rows, np.int64)
        lengths = self.lengths[rows]
        ends = lengths.cumsum()
        shift = self.offsets[rows] - ends + lengths  # from where a value goes to where it is
        at = shift.repeat(lengths) + np.arange(ends[-1] if ends.size else 0)
        return Ragged(self.values[at], lengths)


Column = Dense | Ragged


def taken(column: Column, rows: NDArray[np.integer] | Sequence[int]) -> Column:
    """A copy of these rows, in this order."""
    rows = np.asarray(rows, np.int64)
    return column.take(rows) if isinstance(column, Ragged) else column[rows]


def concatenated(pieces: Sequence[Column]) -> Column:
    """All rows of one or more pieces, one after the other: copied, unless there is only one."""
    if len(pieces) == 1:
        return pieces[0]
    if isinstance(pieces[0], Ragged):
        return Ragged(
            np.concatenate([piece.values for piece in pieces]),  # type: ignore[union-attr]
            np.concatenate([piece.lengths for piece in pieces]),  # type: ignore[union-attr]
        )
    return np.concatenate(pieces)  # type: ignore[arg-type]


def runs(indices: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut indices where they do not go up by one: the (start, stop) of each stretch."""
    found: list[tuple[int, int]] = []
    start = stop = -1
    for index in indices.tolist():
        if index != stop:
            found.append((start, stop))
            start = index
        stop = index + 1
    return [*found[1:], (start, stop)] if found else []


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """The contents of a column. dtype: a NumPy dtype name; shape: of one row of a dense column (() = a scalar)."""

    dtype: str
    ragged: bool = False
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        if self.ragged and self.shape:
            raise ValueError(f"a ragged column has no shape: {self.shape}")

    def check(self, name: str, rows: int, column: Column) -> None:
        """Raise ValueError that names the column unless it has this dtype, this shape and this many rows."""
        if not isinstance(column, Ragged if self.ragged else np.ndarray):
            wanted = "a Ragged" if self.ragged else "an ndarray"
            raise ValueError(f"column {name!r} takes {wanted}, not a {type(column).__name__}")
        values = column.values if isinstance(column, Ragged) else column
        if values.dtype != self.dtype:
            raise ValueError(f"column {name!r} holds {self.dtype}, not {values.dtype}: cast it before the put")
        if isinstance(column, np.ndarray) and column.shape != (rows, *self.shape):
            raise ValueError(f"column {name!r} must be {[rows, *self.shape]} for {rows} rows, not {list(column.shape)}")
        if len(column) != rows:
            raise ValueError(f"column {name!r} has {len(column)} rows for {rows} row ids")

    def check_size(self, name: str, rows: int, size: int) -> None:
        """Raise ValueError unless a packed buffer (see `Frame`) of `size` bytes can hold so many rows."""
        item = np.dtype(self.dtype).itemsize
        if self.ragged:
            values = size - 8 * rows
            fits = values >= 0 and values % item == 0
        else:
            fits = size == rows * item * math.prod(self.shape)
        if not fits:
            raise ValueError(f"column {name!r}: {size} bytes cannot hold {rows} rows of {self}")

    def empty(self) -> Column:
        """The column of no rows."""
        if self.ragged:
            return Ragged(np.empty(0, self.dtype), np.empty(0, np.int64))
        return np.empty((0, *self.shape), self.dtype)


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch in a reader's hands; its arrays are the reader's own, writable.

    rows: int64 [k], the sample ids in dispatch order; columns: those that the task reads, k rows each; lease: what
    `acknowledge` takes. k may be 0 for a data-parallel rank whose share of a short batch is empty.
    """

    partition: str
    rows: Rows
    columns: Mapping[str, Column] = field(repr=False)
    lease: int

    def __len__(self) -> int:
        return self.rows.size

    def dense(self, name: str) -> Dense:
        """A dense column [k, *shape]; TypeError if it is ragged."""
        column = self.columns[name]
        if isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is ragged: use ragged({name!r})")
        return column

    def ragged(self, name: str) -> Ragged:
        """A ragged column of k rows; TypeError if it is dense."""
        column = self.columns[name]
        if not isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is dense: use dense({name!r})")
        return column

    def torch(self, name: str) -> torch.Tensor:
        """The column without a copy: dense [k, *shape], ragged the packed values [sum(ragged(name).lengths)]."""
        import torch

        column = self.columns[name]
        return torch.from_numpy(column.values if isinstance(column, Ragged) else column)


def _least_and_sum(numbers: Rows) -> tuple[int, int]:
    """0 and 0 of none. For few numbers Python takes a sixth of NumPy's time."""
    if numbers.size > _FEW:
        return int(numbers.min()), int(numbers.sum())
    few = numbers.tolist()
    return min(few, default=0), sum(few)


def as_integers(values: Iterable[int] | np.ndarray, what: str) -> Rows:
    """int64 [n] of a sequence of integers; ValueError for anything else."""
    array = values if isinstance(values, np.ndarray) else np.array(list(values))
    if array.ndim == 1 and array.dtype == np.int64:
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{what} must be a list of integers, not {array.dtype} {list(array.shape)}")
    return array.astype(np.int64, copy=False)
