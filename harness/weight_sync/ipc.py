"""Weights between processes that share a device or a host: one buffer that all of them map.

On CPUs the buffer is shared memory: a file in memory that is unlinked as soon as everyone has mapped it, so nothing is
left behind however a process ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import torch

from harness.weight_sync.plan import Bucket, TransferPlan, pack, unpack

_HEADER = 16  # bytes: the version that the buffer holds, as int64, and padding
_WRITING = -1


@dataclass(frozen=True)
class SharedOffer:
    """A buffer by its path. Whoever made it unlinks the path once all receivers have joined."""

    plan: TransferPlan
    path: Path

    def receiver(self, number: int, device: torch.device) -> SharedWeights:
        return SharedWeights(self)


def create_buffer(plan: TransferPlan) -> SharedOffer:
    """A new buffer for one complete set of weights, holding none yet.

    Raises RuntimeError where there is no room: found out later, that would be a bus error and no message.
    """
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    size, free = _HEADER + plan.bytes, shutil.disk_usage(folder).free
    if size > free:
        raise RuntimeError(
            f"the weights need {size} bytes in {folder}, which has {free}; enlarge it (Docker: --shm-size)"
        )
    descriptor, name = tempfile.mkstemp(prefix="cadence-weights-", dir=folder)
    os.ftruncate(descriptor, size)
    os.close(descriptor)
    offer = SharedOffer(plan, Path(name))
    SharedWeights(offer)._version.fill_(_WRITING)
    return offer


class SharedWeights:
    """Both ends of the buffer: training rank 0 sends, engines receive.

    Engines must be idle during a send; schedules see to that, and the version stamp turns a mistake into an error.
    """

    def __init__(self, offer: SharedOffer) -> None:
        self.plan = offer.plan
        # Not torch.from_file: that would make a new, empty file where the offer's is gone.
        with offer.path.open("r+b") as file:
            self._bytes = torch.frombuffer(mmap(file.fileno(), _HEADER + self.plan.bytes), dtype=torch.uint8)
        self._version = self._bytes[:8].view(torch.int64)

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        self._version.fill_(_WRITING)
        for bucket, region in self._regions():
            pack(bucket, parameters, region)
        self._version.fill_(version)

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises RuntimeError unless the buffer holds exactly `version`."""
        held = int(self._version.item())
        if held != version:
            raise RuntimeError(
                f"shared weights hold version {held}, not {version}; send must end before receive starts"
            )
        for bucket, region in self._regions():
            yield from unpack(bucket, region)

    def _regions(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        start = _HEADER
        for bucket in self.plan.buckets:
            yield bucket, self._bytes[start : start + bucket.bytes]
            start += bucket.bytes
