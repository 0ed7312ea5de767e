"""In the memory of this process: a frame carries its columns itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from harness.transfer_queue.columns import Column, ColumnSpec
from harness.transfer_queue.frames import Buffer, Frame, Handout, cut, joined, pack


class LocalStorage:
    """Storage and Keeper at once: whoever holds a frame keeps it."""

    waits = False
    pinned = True

    def write(self, partition: str, columns: Mapping[str, Column]) -> Frame:
        kept = {name: column.copy() for name, column in columns.items()}
        rows = len(next(iter(kept.values()), ()))
        return Frame(rows, {name: column.nbytes for name, column in kept.items()}, kept)

    def read(self, handout: Handout, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        for part in handout.parts:
            for name in part.columns:
                pieces = [cut(_columns(handout.frames[f])[name], start, stop) for f, start, stop in part.runs]
                column = joined(pieces, specs[name])
                columns[name] = column.copy() if len(pieces) == 1 else column
        return columns

    def discard(self, partition: str, frame: Frame) -> None:
        """It goes with its last reference."""

    def drop(self, partition: str) -> None:
        """Frames go with the partition's record."""

    async def fetch(self, partition: str, frame: Frame) -> dict[str, Buffer]:
        return {
            name: np.concatenate([array.reshape(-1).view(np.uint8) for array in pack(column)])
            for name, column in _columns(frame).items()
        }

    def close(self) -> None:
        """Nothing is held."""


def _columns(frame: Frame) -> Mapping[str, Column]:
    assert isinstance(frame.place, Mapping)
    return frame.place
