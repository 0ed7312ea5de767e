"""Where payloads are: knows positions and bytes, nothing of readiness or readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from harness.transfer_queue.columns import Column, Ragged, gather, runs
from harness.transfer_queue.control.partition import Positions

_INDEX_BITS = 32  # a slot is (number of the chunk) << 32 | (row in the chunk)


class Storage(Protocol):
    """One backend. The queue writes a cell once, reads only what was written, and drops a partition when no read or
    write of it is under way; a backend need not check. Any call may fail: the queue then undoes the put or the get."""

    async def write(self, partition: str, positions: Positions, columns: Mapping[str, Column]) -> None:
        """Keep a copy of these cells, so that the writer may go on changing its arrays."""

    async def read(self, partition: str, positions: Positions, columns: Sequence[str]) -> dict[str, Column]:
        """The cells in the order of `positions`, as arrays of the reader's own."""

    async def drop(self, partition: str) -> None:
        """Free all that was written for the partition; nothing to do if that is nothing."""

    def nbytes(self, partition: str) -> int:
        """Payload bytes held for the partition."""


@dataclass(slots=True)
class _Chunks:
    """One column of one partition: what each put brought, packed as it came, and where each row's value is."""

    parts: list[Column] = field(default_factory=list)
    slots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def append(self, positions: Positions, rows: int, index: Positions, column: Column) -> None:
        """rows: more than any position; index: 0, 1, ..., one a position."""
        if rows > self.slots.size:
            self.slots = np.resize(self.slots, max(rows, 2 * self.slots.size))  # what is not written is never read
        self.slots[positions] = (len(self.parts) << _INDEX_BITS) + index
        self.parts.append(column.copy())

    def read(self, slices: Sequence[tuple[int, int, int]]) -> Column:
        if isinstance(self.parts[0], Ragged):
            return gather(self.parts, slices)  # type: ignore[arg-type]  # a column is ragged in every put or in none
        if not slices:
            return self.parts[0][:0].copy()
        return np.concatenate([self.parts[p][start:stop] for p, start, stop in slices])  # type: ignore[index]


def _gathered(columns: Sequence[_Chunks], positions: Positions) -> list[Column]:
    """These rows of all columns. Those that were put together lie alike, so that where they lie is worked out once."""
    known: dict[bytes, list[tuple[int, int, int]]] = {}
    gathered = []
    for column in columns:
        slots = column.slots[positions]
        key = slots.tobytes()
        if key not in known:
            known[key] = [_slice(start, stop) for start, stop in runs(slots)]
        gathered.append(column.read(known[key]))
    return gathered


class LocalStorage:
    """In the memory of this process: one packed array per column and put, gathered when read."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Chunks]] = {}
        self._bytes: dict[str, int] = {}

    async def write(self, partition: str, positions: Positions, columns: Mapping[str, Column]) -> None:
        held = self._partitions.setdefault(partition, {})
        rows, index = int(positions.max(initial=-1)) + 1, np.arange(positions.size)
        for name, column in columns.items():
            held.setdefault(name, _Chunks()).append(positions, rows, index, column)
        self._bytes[partition] = self._bytes.get(partition, 0) + sum(column.nbytes for column in columns.values())

    async def read(self, partition: str, positions: Positions, columns: Sequence[str]) -> dict[str, Column]:
        held = self._partitions[partition]
        return dict(zip(columns, _gathered([held[name] for name in columns], positions), strict=True))

    async def drop(self, partition: str) -> None:
        self._partitions.pop(partition, None)
        self._bytes.pop(partition, None)

    def nbytes(self, partition: str) -> int:
        return self._bytes.get(partition, 0)


def _slice(start: int, stop: int) -> tuple[int, int, int]:
    index = start & ((1 << _INDEX_BITS) - 1)
    return start >> _INDEX_BITS, index, index + stop - start
