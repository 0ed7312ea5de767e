"""The server's side of shared memory: it holds a descriptor of every segment, and believes no writer."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from harness.transfer_queue.frames import Buffer, Frame, Handout
from harness.transfer_queue.storage.inline import inline_buffers

ALIGNMENT = 64


def layout(sizes: Mapping[str, int]) -> tuple[list[int], int]:
    """Where each column of a frame starts, counted from the frame's first byte, and the length of it all."""
    ends = list(accumulate([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()]))
    return [0, *ends[:-1]], ends[-1] if ends else 0


@dataclass(slots=True)
class Held:
    """A segment of a partition; size: bytes that are known to be in it, which can only become more."""

    partition: str
    descriptor: int
    size: int


class ShmKeeper:
    """dropped(partition, writers): called after a partition was dropped in which these writers have segments."""

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

    def placed(self, handout: Handout) -> tuple[tuple[Frame, ...], list[int]]:
        """Its frames as a reader finds them, (which descriptor, where in it), and these descriptors."""
        units: dict[int, int] = {}
        frames = []
        for frame in handout.frames:
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
        if isinstance(frame.place, bytes):
            return inline_buffers(frame)
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
