"""Rows that lie in several places of shared memory or messages, read straight into arrays of the reader's own: as few
system calls as there are stretches, and no other copy."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Self

import numpy as np

from harness.transfer_queue.rows.columns import Column, ColumnSpec, Ragged, concatenated, taken
from harness.transfer_queue.rows.frames import BatchAssignment, Buffer, Frame, Part, pack, unpack
from harness.transfer_queue.storage.inline import inline

ALIGNMENT = 64
"""Alignment of columns in shared memory, in bytes."""
_LENGTH = 8
_MOST = 1000  # buffers of a system call; the kernel takes 1024
_WASTE = 64 << 10
"""Bytes that may travel for nothing: fewer cost less than a copy."""
_PADDING = memoryview(bytearray(ALIGNMENT))  # where what lies between two columns goes


def layout(sizes: Mapping[str, int]) -> tuple[list[int], int]:
    """Start of each column of a frame, counted from the frame's first byte, and the length of it all."""
    ends = list(accumulate([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()]))
    return [0, *ends[:-1]], ends[-1] if ends else 0


@dataclass(slots=True)
class Source:
    """A frame, (descriptor, where in it) or inline, and what is to be read of it: (where in the frame, into what)."""

    frame: Frame
    starts: Mapping[str, int]
    reads: list[tuple[int, memoryview]] = field(default_factory=list)

    @classmethod
    def of(cls, frame: Frame) -> Self:
        """A frame with the start of each column."""
        if isinstance(frame.place, bytes):  # back to back
            ends = np.cumsum([0, *frame.sizes.values()]).tolist()
            return cls(frame, dict(zip(frame.sizes, ends, strict=False)))
        return cls(frame, dict(zip(frame.sizes, layout(frame.sizes)[0], strict=True)))

    def read(self) -> None:
        """Carry the reads out. ValueError where the segment ends too early."""
        self.reads.sort(key=itemgetter(0))
        if isinstance(self.frame.place, bytes):
            data = memoryview(self.frame.place)
            for at, into in self.reads:
                into[:] = data[at : at + len(into)]
        else:
            self._scatter()
        self.reads.clear()

    def _scatter(self) -> None:
        together: list[memoryview] = []
        first = end = 0
        for at, into in self.reads:
            if not 0 <= at - end < ALIGNMENT or len(together) > _MOST:
                self._fill(together, first, end)
                together, first = [], at
            elif together and at > end:
                together.append(_PADDING[: at - end])
            elif not together:
                first = at
            together.append(into)
            end = at + len(into)
        self._fill(together, first, end)

    def _fill(self, pieces: list[memoryview], first: int, end: int) -> None:
        assert isinstance(self.frame.place, tuple)
        descriptor, start = self.frame.place
        if pieces and (got := os.preadv(descriptor, pieces, start + first)) != end - first:
            raise ValueError(f"a segment gave {got} of {end - first} bytes of a frame at {start}")


def gathered(frames: tuple[Frame, ...], parts: Iterable[Part], specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
    """The columns of these parts. Lengths are read with the values where all of a frame is wanted, else before them;
    many short runs are picked from whole frames."""
    sources = {f: Source.of(frames[f]) for f in dict.fromkeys(f for part in parts for f, _, _ in part.runs)}
    found: dict[str, Column] = {}
    ragged: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for part in parts:
        starts = {f: sources[f].starts for f, _, _ in part.runs}
        if worth_picking(frames, starts, part):
            found |= picked(frames, starts, part, specs)
            continue
        runs = [(sources[f], start, stop) for f, start, stop in part.runs]
        for name in part.columns:
            if specs[name].ragged:
                ragged[name] = _ragged(name, runs, specs[name])
            else:
                found[name] = _dense(name, runs, specs[name])
    for source in sources.values():
        source.read()
    return found | {name: Ragged(values, lengths) for name, (values, lengths) in ragged.items()}


Run = tuple[Source, int, int]
"""Rows start to stop of a frame."""


def _dense(name: str, runs: list[Run], spec: ColumnSpec) -> np.ndarray:
    """Memory where the rows will be, and what to read into it."""
    item = np.dtype(spec.dtype).itemsize * math.prod(spec.shape)
    rows = sum([stop - start for _, start, stop in runs])
    memory = np.empty(rows * item, np.uint8)
    data, at = memory.data, 0
    for source, start, stop in runs:
        size = (stop - start) * item
        source.reads.append((source.starts[name] + start * item, data[at : at + size]))
        at += size
    return memory.view(spec.dtype).reshape(rows, *spec.shape)


def _ragged(name: str, runs: list[Run], spec: ColumnSpec) -> tuple[np.ndarray, np.ndarray]:
    """Memory where values and lengths will be, and what to read into it. ValueError for lengths that do not fit."""
    item = np.dtype(spec.dtype).itemsize
    lengths = np.empty(sum([stop - start for _, start, stop in runs]), np.int64)
    data, at, places = lengths.view(np.uint8).data, 0, []
    for source, start, stop in runs:
        head, begin = source.frame.rows * _LENGTH, source.starts[name]
        first, size = 0, source.frame.sizes[name] - head
        end = at + stop - start
        if (start, stop) == (0, source.frame.rows):
            source.reads.append((begin, data[at * _LENGTH : end * _LENGTH]))
        else:  # only the lengths before them say where these rows are
            before = np.empty(stop, np.int64)
            source.reads.append((begin, before.view(np.uint8).data))
            source.read()
            lengths[at:end] = before[start:]
            held, first, size = size, int(before[:start].sum()) * item, int(before[start:].sum()) * item
            if not 0 <= first <= first + size <= held:
                raise ValueError(f"column {name!r}: rows {start} to {stop} are {size} bytes from {first} of {held}")
        places.append((source, begin + head + first, size))
        at = end
    values = np.empty(sum([size for _, _, size in places]), np.uint8)
    data, at = values.data, 0
    for source, begin, size in places:
        source.reads.append((begin, data[at : at + size]))
        at += size
    return values.view(spec.dtype), lengths


def trimmed(assignment: BatchAssignment, specs: Mapping[str, ColumnSpec]) -> BatchAssignment:
    """The same rows, gathered into one frame where they are a small part of large ones that travel in messages."""
    sizes = [len(frame.place) for frame in assignment.frames if isinstance(frame.place, bytes)]
    if len(sizes) < len(assignment.frames) or sum(sizes) <= _WASTE:
        return assignment
    asked = sum(
        assignment.frames[f].sizes[name] * (stop - start) // max(1, assignment.frames[f].rows)
        for part in assignment.parts
        for f, start, stop in part.runs
        for name in part.columns
    )
    if sum(sizes) <= asked + _WASTE:
        return assignment
    columns = gathered(assignment.frames, assignment.parts, specs)
    rows = assignment.rows.size
    frame = inline({name: pack(column) for name, column in columns.items()}, rows)
    return assignment._replace(frames=(frame,), parts=(Part(tuple(columns), ((0, 0, rows),)),))


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
    frames: tuple[Frame, ...], starts: Mapping[int, Mapping[str, int]], part: Part, specs: Mapping[str, ColumnSpec]
) -> dict[str, Column]:
    """The columns of this part. ValueError where a segment ends too early, or a frame does not hold what it says."""
    counts = [frames[f].rows for f in starts]
    first = dict(zip(starts, accumulate([0, *counts]), strict=False))  # row of each, as they lie one after another
    rows = np.array([row for f, start, stop in part.runs for row in range(first[f] + start, first[f] + stop)], np.int64)
    buffers = [_buffers(frames[f], starts[f], part.columns) for f in starts]
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
