"""Payloads in shared memory of one node, without a name: nothing is left behind, whichever process is killed.

A writer appends its frames to one memfd per partition, a segment, whose descriptor the server holds too and passes to
the readers of its rows. When the partition is cleared, server and writer let go; a reader's arrays are its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

import numpy as np

from harness.transfer_queue.rows.columns import Column, ColumnSpec
from harness.transfer_queue.rows.frames import BatchAssignment, Buffer, Frame, Part, assemble, pack
from harness.transfer_queue.storage.gather import ALIGNMENT, gathered, layout
from harness.transfer_queue.storage.inline import SMALL, inline
from harness.transfer_queue.storage.protocol import QueueSession

MAPPED = 4 << 20
"""Bytes of a stretch from which mapping it costs less than copying it: below, page faults cost more than the copy."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class ShmBackend:
    """inline_bytes: of a put that goes in its message; mapped_bytes: of a frame that readers map instead of copying."""

    one_machine: ClassVar[bool] = True
    inline_bytes: int = SMALL
    mapped_bytes: int = MAPPED

    def storage(self, session: QueueSession) -> ShmStorage:
        return ShmStorage(session.writer, self.inline_bytes, self.mapped_bytes)

    def store(self, queue: str) -> ShmStore:
        return ShmStore()


@dataclass(slots=True)
class Held:
    """A segment of a partition; size: bytes that are known to be in it, which can only become more."""

    partition: str
    descriptor: int
    size: int


class ShmStore:
    """The server's side: it holds a descriptor of every segment, and believes no writer.

    dropped(partition, writers): called after a partition was dropped in which these writers have segments."""

    pinned = True

    def __init__(self) -> None:
        self.dropped: Callable[[str, set[int]], None] = lambda partition, writers: None
        self._segments: dict[int, Held] = {}
        self._units: dict[str, set[int]] = {}

    def open(self, writer: int, partition: str, unit: int, descriptor: int) -> None:
        """Keep a copy of a writer's descriptor. ValueError unless it is a memfd that cannot shrink, of a number that
        is the writer's own and new."""
        if unit >> 32 != writer or unit in self._segments:
            raise ValueError(f"segment {unit} is not one that writer {writer} may open")
        if any(other >> 32 == writer for other in self._units.get(partition, ())):
            raise ValueError(f"writer {writer} has a segment in partition {partition!r} already")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            raise ValueError(f"segment {unit} is not shared memory: its descriptor knows no seals") from None
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError(f"segment {unit} is not sealed against shrinking: its readers could be killed by that")
        self._segments[unit] = Held(partition, os.dup(descriptor), 0)
        self._units.setdefault(partition, set()).add(unit)

    def check(self, writer: int, partition: str, frame: Frame) -> None:
        """ValueError unless the frame lies in a segment of this writer and this partition, or in its message."""
        if isinstance(frame.place, bytes):
            return
        assert isinstance(frame.place, tuple)
        unit, start = frame.place
        held = self._segments.get(unit)
        if held is None or unit >> 32 != writer or held.partition != partition:
            raise ValueError(f"writer {writer} has no segment {unit} in partition {partition!r}")
        starts, _ = layout(frame.sizes)
        end = start + starts[-1] + list(frame.sizes.values())[-1] if starts and frame.sizes else start
        if end > held.size:
            held.size = os.fstat(held.descriptor).st_size
        if end > held.size or start % ALIGNMENT:
            raise ValueError(f"a frame from {start} to {end} does not fit into segment {unit} of {held.size} bytes")

    def placed(self, assignment: BatchAssignment) -> tuple[tuple[Frame, ...], list[int]]:
        """Frames of an assignment as a reader finds them, (which descriptor, where in it), and these descriptors."""
        units: dict[int, int] = {}
        frames = []
        for frame in assignment.frames:
            if isinstance(frame.place, tuple):
                unit, start = frame.place
                frame = Frame(frame.rows, frame.sizes, (units.setdefault(unit, len(units)), start))
            frames.append(frame)
        return tuple(frames), [self._segments[unit].descriptor for unit in units]

    def drop(self, partition: str) -> None:
        units = self._units.pop(partition, set())
        for unit in units:
            os.close(self._segments.pop(unit).descriptor)
        if units:
            self.dropped(partition, {unit >> 32 for unit in units})

    async def fetch(self, partition: str, frame: Frame) -> dict[str, Buffer]:
        assert isinstance(frame.place, tuple)
        unit, start = frame.place
        buffers = {}
        for (name, size), at in zip(frame.sizes.items(), layout(frame.sizes)[0], strict=True):
            buffers[name] = np.empty(size, np.uint8)
            if os.preadv(self._segments[unit].descriptor, [buffers[name].data], start + at) != size:
                raise ValueError(f"segment {unit} ends before column {name!r} of a frame in it")
        return buffers

    def close(self) -> None:
        for partition in list(self._units):
            self.drop(partition)


@dataclass(slots=True)
class Segment:
    """end: where the next frame goes; announced: whether the server was passed the descriptor."""

    unit: int
    descriptor: int
    end: int = 0
    announced: bool = False


@dataclass(slots=True)
class ShmStorage:
    """The side of a client. In an assignment that it reads, a frame's place is (descriptor, where in it); descriptors
    stay the caller's."""

    writer: int
    inline_bytes: int
    mapped_bytes: int
    waits: bool = False
    _segments: dict[str, Segment] = field(default_factory=dict)
    _made: int = 0

    def write(self, partition: str, columns: Mapping[str, Column]) -> Frame:
        packed = {name: pack(column) for name, column in columns.items()}
        rows = len(next(iter(columns.values()), ()))
        sizes = {name: sum([array.nbytes for array in arrays]) for name, arrays in packed.items()}
        if sum(sizes.values()) <= self.inline_bytes:
            return inline(packed, rows)
        segment = self._segment(partition)
        start = segment.end
        starts, length = layout(sizes)
        segment.end += length
        _write(segment.descriptor, start, *_padded(packed, starts))
        return Frame(rows, sizes, (segment.unit, start))

    def _segment(self, partition: str) -> Segment:
        if partition not in self._segments:
            self._segments[partition] = Segment(self.writer << 32 | self._made, _new_memory(partition))
            self._made += 1
        return self._segments[partition]

    def unannounced(self, partition: str) -> Segment | None:
        """The segment of a partition, if the server does not have its descriptor yet; from now on it counts as
        announced."""
        segment = self._segments.get(partition)
        if segment is None or segment.announced:
            return None
        segment.announced = True
        return segment

    def forget(self, partition: str) -> None:
        """The partition is gone: let go of its segment, if there is one."""
        segment = self._segments.pop(partition, None)
        if segment is not None:
            os.close(segment.descriptor)

    def discard(self, partition: str, frame: Frame) -> None:
        """The last frame's memory is used again; an earlier one's goes with the partition."""
        segment = self._segments.get(partition)
        if segment is not None and isinstance(frame.place, tuple):
            unit, start = frame.place
            if (segment.unit, segment.end) == (unit, start + layout(frame.sizes)[1]):
                segment.end = start

    def read(self, assignment: BatchAssignment, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        mapped = [part for part in assignment.parts if self._worth_mapping(assignment, part)]
        columns: dict[str, Column] = {}
        if mapped:
            buffers = {
                (f, name): buffer
                for part in mapped
                for f, _, _ in part.runs
                for name, buffer in mapped_columns(assignment.frames[f], part.columns).items()
            }
            columns = assemble(assignment._replace(parts=tuple(mapped)), buffers, specs)
        return columns | gathered(assignment.frames, [part for part in assignment.parts if part not in mapped], specs)

    def _worth_mapping(self, assignment: BatchAssignment, part: Part) -> bool:
        """One long stretch, in shared memory."""
        if len(part.runs) != 1:
            return False
        f, start, stop = part.runs[0]
        frame = assignment.frames[f]
        size = sum([frame.sizes[name] for name in part.columns]) * (stop - start) // max(1, frame.rows)
        return isinstance(frame.place, tuple) and size >= self.mapped_bytes

    def close(self) -> None:
        for partition in list(self._segments):
            self.forget(partition)


def stretches(sizes: Mapping[str, int], wanted: Iterable[str]) -> list[tuple[list[str], int, int]]:
    """Neighbouring columns that are wanted: their names, where the first starts, and bytes to the end of the last."""
    starts, _ = layout(sizes)
    found = []
    columns = zip(sizes.items(), starts, strict=True)
    wanted = set(wanted)
    for is_wanted, group in groupby(columns, lambda column: column[0][0] in wanted):
        if is_wanted:
            together = list(group)
            first, ((_, size), last) = together[0][1], together[-1]
            found.append(([name for (name, _), _ in together], first, last + size - first))
    return found


def _new_memory(partition: str) -> int:
    """A memfd that cannot be made shorter: what a reader has mapped stays there."""
    descriptor = os.memfd_create(f"transfer-queue {partition}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def _padded(packed: Mapping[str, Sequence[np.ndarray]], starts: Sequence[int]) -> tuple[list[memoryview | bytes], int]:
    """The arrays in their order, with what lies between the columns; and the bytes of it all."""
    pieces: list[memoryview | bytes] = []
    at = 0
    for arrays, start in zip(packed.values(), starts, strict=True):
        if start > at:
            pieces.append(bytes(start - at))
            at = start
        for array in arrays:
            pieces.append(array.data)
            at += array.nbytes
    return pieces, at


def _write(descriptor: int, start: int, pieces: list[memoryview | bytes], size: int) -> None:
    """All of it: one system call, but for what is longer than a system call takes."""
    written = os.pwritev(descriptor, pieces, start)
    if written < size:
        rest = [np.frombuffer(piece, np.uint8).data for piece in pieces if memoryview(piece).nbytes]
        _write_rest(descriptor, start, rest, written)


def _write_rest(descriptor: int, start: int, pieces: list[memoryview], written: int) -> None:
    """Write what is left of the pieces once so many bytes of them were written at `start`."""
    while pieces:
        start += written
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][written:]
            written = os.pwritev(descriptor, pieces, start)


def mapped_columns(frame: Frame, names: Iterable[str]) -> dict[str, Buffer]:
    """The buffers of these columns of a frame whose place is (descriptor, where in it)."""
    assert isinstance(frame.place, tuple)
    descriptor, start = frame.place
    buffers: dict[str, Buffer] = {}
    for together, first, length in stretches(frame.sizes, names):
        data = _map(descriptor, start + first, length)
        for name, at in zip(together, layout({name: frame.sizes[name] for name in together})[0], strict=True):
            buffers[name] = data[at : at + frame.sizes[name]]
    return buffers


def _map(descriptor: int, start: int, length: int) -> Buffer:
    """A view of the segment that copies a page when it is written to, for as long as an array of it lives.

    Not by the standard library's mmap, which keeps a descriptor open with every mapping.
    """
    head = start % mmap.PAGESIZE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _LIBC.mmap(None, head + length, protection, mmap.MAP_PRIVATE, descriptor, start - head)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {length} bytes of a segment could not be mapped")
    pages = (ctypes.c_uint8 * (head + length)).from_address(address)
    weakref.finalize(pages, _LIBC.munmap, address, head + length).atexit = False
    return np.frombuffer(memoryview(pages), np.uint8, length, head)
