"""Rows in many short runs of small frames, such as samples in the order in which they were finished: each frame is read
once, and the rows are picked out of it in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import numpy as np

from harness.transfer_queue.rows.columns import Column, ColumnSpec, concatenated, taken
from harness.transfer_queue.rows.frames import Buffer, Frame, Part, unpack

_PER_RUN = 16 << 10
"""Bytes that may be read for nothing for each run: they cost less than to read the run by itself."""


def worth_picking(frames: tuple[Frame, ...], starts: Mapping[int, Mapping[str, int]], part: Part) -> bool:
    """Whether several runs of a frame cost more than to read all of it. starts: of the columns, by frame."""
    if len(part.runs) <= len(starts):
        return False
    extents = {f: _extent(frames[f], starts[f], part.columns) for f in starts}
    sizes = {f: stop - start for f, (start, stop) in extents.items()}
    asked = sum([sizes[f] * (stop - start) // max(1, frames[f].rows) for f, start, stop in part.runs])
    return sum(sizes.values()) - asked <= _PER_RUN * len(part.runs)


def picked(
    frames: tuple[Frame, ...],
    starts: Mapping[int, Mapping[str, int]],
    part: Part,
    specs: Mapping[str, ColumnSpec],
) -> dict[str, Column]:
    """The columns of this part. ValueError where a segment ends too early, or a frame does not hold what it says."""
    ends = np.cumsum([frames[f].rows for f in starts]).tolist()
    first = dict(zip(starts, [0, *ends], strict=False))  # row of each frame, where they lie one after the other
    rows = np.concatenate([np.arange(first[f] + start, first[f] + stop) for f, start, stop in part.runs])
    buffers = [_buffers(frames[f], starts[f], part.columns) for f in starts]
    counts = [frames[f].rows for f in starts]
    columns: dict[str, Column] = {}
    for name in part.columns:
        spec = specs[name]
        pieces = [unpack(of[name], spec, n) for of, n in zip(buffers, counts, strict=True)]
        columns[name] = taken(concatenated(pieces), rows)
    return columns


def _extent(frame: Frame, starts: Mapping[str, int], names: Iterable[str]) -> tuple[int, int]:
    """Offsets in the frame at which the first of these columns starts, and the last one ends."""
    return min([starts[name] for name in names]), max([starts[name] + frame.sizes[name] for name in names])


def _buffers(frame: Frame, starts: Mapping[str, int], names: Iterable[str]) -> dict[str, Buffer]:
    start, stop = _extent(frame, starts, names)
    if isinstance(frame.place, bytes):
        data = np.frombuffer(frame.place, np.uint8, stop - start, start)
    else:
        assert isinstance(frame.place, tuple)
        descriptor, place = frame.place
        data = np.empty(stop - start, np.uint8)
        if (got := os.preadv(descriptor, [data.data], place + start)) != data.size:
            raise ValueError(f"a segment gave {got} of {data.size} bytes of a frame at {place}")
    return {name: data[starts[name] - start : starts[name] - start + frame.sizes[name]] for name in names}
