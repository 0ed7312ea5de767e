"""In the messages themselves: small puts on any backend, and all puts where only a stream connects the processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from harness.transfer_queue.columns import Column, ColumnSpec
from harness.transfer_queue.frames import Buffer, Frame, Handout, assemble, pack
from harness.transfer_queue.storage.protocol import Session

SMALL = 4096
"""Bytes of a put up to which a copy more costs less than a place of its own."""


def inline(columns: Mapping[str, list[np.ndarray]], rows: int) -> Frame:
    """A frame that carries its buffers (`frames.pack`) itself."""
    sizes = {name: sum(array.nbytes for array in arrays) for name, arrays in columns.items()}
    place = b"".join([array.tobytes() for arrays in columns.values() for array in arrays])
    return Frame(rows, sizes, place)


def inline_buffers(frame: Frame) -> dict[str, Buffer]:
    """Its buffers, by column: writable copies, so that each starts where its items may."""
    assert isinstance(frame.place, bytes)
    ends = accumulate(frame.sizes.values())
    return {
        name: np.frombuffer(frame.place, np.uint8, size, end - size).copy()
        for (name, size), end in zip(frame.sizes.items(), ends, strict=True)
    }


@dataclass(frozen=True, slots=True)
class InlineBackend:
    """Every frame travels in its message and lies in the memory of the queue's process: also over TCP."""

    def storage(self, session: Session) -> InlineStorage:
        return InlineStorage()

    def keeper(self, queue: str) -> InlineKeeper:
        return InlineKeeper()


class InlineStorage:
    waits = False

    def write(self, partition: str, columns: Mapping[str, Column]) -> Frame:
        rows = len(next(iter(columns.values()), ()))
        return inline({name: pack(column) for name, column in columns.items()}, rows)

    def read(self, handout: Handout, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        buffers = {
            (f, name): buffer
            for f, frame in enumerate(handout.frames)
            for name, buffer in inline_buffers(frame).items()
        }
        return assemble(handout, buffers, specs)

    def discard(self, partition: str, frame: Frame) -> None:
        """It goes with its last reference."""

    def close(self) -> None:
        """Nothing is held."""


class InlineKeeper:
    pinned = True

    def drop(self, partition: str) -> None:
        """Frames go with the partition's record."""

    async def fetch(self, partition: str, frame: Frame) -> dict[str, Buffer]:
        return inline_buffers(frame)

    def close(self) -> None:
        """Nothing is held."""
