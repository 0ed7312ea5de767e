"""In shared memory of one node, without a name: nothing can be left behind, whoever is killed.

A writer appends its frames to one memfd per partition, a segment, whose descriptor the server holds too and passes to
whoever is handed rows of it. When the partition is cleared, server and writer let go; a reader's arrays are its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from harness.transfer_queue.columns import Column, ColumnSpec
from harness.transfer_queue.frames import Buffer, Frame, Handout, Part, assemble, pack
from harness.transfer_queue.storage.inline import SMALL, inline
from harness.transfer_queue.storage.protocol import Session
from harness.transfer_queue.storage.shm_gather import gathered
from harness.transfer_queue.storage.shm_keeper import ShmKeeper, layout

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

    inline_bytes: int = SMALL
    mapped_bytes: int = MAPPED

    def storage(self, session: Session) -> ShmStorage:
        return ShmStorage(session.writer, self.inline_bytes, self.mapped_bytes)

    def keeper(self, queue: str) -> ShmKeeper:
        return ShmKeeper()


@dataclass(slots=True)
class Segment:
    """end: where the next frame goes; announced: whether the server was passed the descriptor."""

    unit: int
    descriptor: int
    end: int = 0
    announced: bool = False


@dataclass(slots=True)
class ShmStorage:
    """In a handout that it reads, a frame's place is (descriptor, where in it); descriptors stay the caller's."""

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
        """The segment of a partition, if the server does not have its descriptor yet; from now on it counts as told."""
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

    def read(self, handout: Handout, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        mapped = [part for part in handout.parts if self._worth_mapping(handout, part)]
        columns: dict[str, Column] = {}
        if mapped:
            buffers = {
                (f, name): buffer
                for part in mapped
                for f, _, _ in part.runs
                for name, buffer in mapped_columns(handout.frames[f], part.columns).items()
            }
            columns = assemble(replace(handout, parts=tuple(mapped)), buffers, specs)
        return columns | gathered(handout.frames, [part for part in handout.parts if part not in mapped], specs)

    def _worth_mapping(self, handout: Handout, part: Part) -> bool:
        """One long stretch, in shared memory."""
        if len(part.runs) != 1:
            return False
        f, start, stop = part.runs[0]
        frame = handout.frames[f]
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
    """A memfd that nobody can make shorter: what a reader has mapped stays there."""
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
    """What is left of the pieces once so many bytes of them were written at `start`."""
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
