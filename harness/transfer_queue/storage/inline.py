"""Payload without a place of its own: in the messages (small puts on any backend, all puts where only a stream connects
the processes), or as it is in the memory of one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from harness.transfer_queue.rows.columns import Column, ColumnSpec
from harness.transfer_queue.rows.frames import BatchAssignment, Buffer, Frame, assemble, cut, joined, pack
from harness.transfer_queue.storage.protocol import QueueSession

SMALL = 4096
"""Bytes of a put up to which a copy more costs less than a place of its own."""


def inline(columns: Mapping[str, list[np.ndarray]], rows: int) -> Frame:
    """A frame that carries its buffers (`frames.pack`) itself."""
    sizes = {name: sum(array.nbytes for array in arrays) for name, arrays in columns.items()}
    place = b"".join([array.tobytes() for arrays in columns.values() for array in arrays])
    return Frame(rows, sizes, place)


def inline_buffers(frame: Frame) -> dict[str, Buffer]:
    """Buffers of a frame by column: writable copies, so that each starts where its items may."""
    assert isinstance(frame.place, bytes)
    ends = accumulate(frame.sizes.values())
    return {
        name: np.frombuffer(frame.place, np.uint8, size, end - size).copy()
        for (name, size), end in zip(frame.sizes.items(), ends, strict=True)
    }


class _Held:
    """Storage and PayloadStore at once, of frames that carry their payload: it lives as long as they are held."""

    waits = False
    pinned = True

    def discard(self, partition: str, frame: Frame) -> None:
        """Do nothing: a frame goes with its last reference."""

    def drop(self, partition: str) -> None:
        """Frames go with the partition's record."""

    async def fetch(self, partition: str, frame: Frame) -> dict[str, Buffer]:
        raise AssertionError("every frame carries its buffers")

    def close(self) -> None:
        """Nothing is held."""


class InlineStorage(_Held):
    """A frame carries its buffers, back to back."""

    def write(self, partition: str, columns: Mapping[str, Column]) -> Frame:
        rows = len(next(iter(columns.values()), ()))
        return inline({name: pack(column) for name, column in columns.items()}, rows)

    def read(self, assignment: BatchAssignment, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        buffers = {
            (f, name): buffer
            for f, frame in enumerate(assignment.frames)
            for name, buffer in inline_buffers(frame).items()
        }
        return assemble(assignment, buffers, specs)


class LocalStorage(_Held):
    """A frame carries its columns: for one process."""

    def write(self, partition: str, columns: Mapping[str, Column]) -> Frame:
        kept = {name: column.copy() for name, column in columns.items()}
        rows = len(next(iter(kept.values()), ()))
        return Frame(rows, {name: column.nbytes for name, column in kept.items()}, kept)

    def read(self, assignment: BatchAssignment, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        for part in assignment.parts:
            for name in part.columns:
                pieces = [cut(_columns(assignment.frames[f])[name], start, stop) for f, start, stop in part.runs]
                column = joined(pieces, specs[name])
                columns[name] = column.copy() if len(pieces) == 1 else column
        return columns


def _columns(frame: Frame) -> Mapping[str, Column]:
    assert isinstance(frame.place, Mapping)
    return frame.place


@dataclass(frozen=True, slots=True)
class InlineBackend:
    """Every frame travels in its message and lies in the memory of the queue's process: also over TCP."""

    def storage(self, session: QueueSession) -> InlineStorage:
        return InlineStorage()

    def store(self, queue: str) -> InlineStorage:
        return InlineStorage()
