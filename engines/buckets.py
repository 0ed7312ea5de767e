"""Weights packed into buckets, by which an adapter gives them to its engine's processes, and unpacked there.

Loaded in vLLM's workers and SGLang's schedulers: needs as little else as can be.
"""

import math
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from mmap import ACCESS_COPY, mmap
from typing import Any

import torch

_ALIGNMENT = 16  # bytes; every dtype can be viewed at such an offset


@dataclass
class BucketContents:
    """Tensors in the first `size` bytes of a buffer, each from its offset on."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    size: int


class PackedBucket(BucketContents):
    """Tensors, one after the other in the first `size` bytes of `buffer` (uint8). path: of its file, on the host."""

    def __init__(self, buffer: torch.Tensor, path: str | None) -> None:
        super().__init__([], [], [], [], 0)
        self.buffer, self._path = buffer, path

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether there is room for this one too."""
        return self._next + tensor.nbytes <= len(self.buffer)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the buffer and note its name, dtype, shape and place."""
        start, self.size = self._next, self._next + tensor.nbytes
        self.buffer[start : self.size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.names.append(name)
        self.dtypes.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(list(tensor.shape))
        self.offsets.append(start)

    @property
    def _next(self) -> int:
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT

    def handle(self) -> list[Any]:
        """Plain values, no pickle, by which another process of this GPU, or of this host, maps the buffer, which is
        complete."""
        if self._path is not None:
            return [self._path]
        torch.cuda.synchronize(self.buffer.device)
        return list(self.buffer.untyped_storage()._share_cuda_())

    def described(self) -> dict[str, Any]:
        """The fields of `BucketContents`; plain values."""
        return asdict(self)


def buckets(weights: Iterable[tuple[str, torch.Tensor]], device: torch.device, limit: int) -> Iterator[PackedBucket]:
    """Copies of the weights, in buckets of at most `limit` bytes on `device`; a larger tensor travels alone.

    The next bucket uses the memory of the one before.
    """
    buffer, path = _memory(limit, device)
    bucket = PackedBucket(buffer, path)
    for name, tensor in weights:
        if not bucket.holds(tensor):
            if bucket.names:
                yield bucket
            if tensor.nbytes > len(buffer):
                buffer, path = _memory(tensor.nbytes, device)
            bucket = PackedBucket(buffer, path)
        bucket.add(name, tensor)
    if bucket.names:
        yield bucket


def _memory(size: int, device: torch.device) -> tuple[torch.Tensor, str | None]:
    """Memory of so many bytes that other processes can map; on the host a file without a name, and its path while the
    tensor lives."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device), None
    descriptor = os.memfd_create("weights")
    os.truncate(descriptor, size)
    buffer = torch.frombuffer(mmap(descriptor, size), dtype=torch.uint8)
    weakref.finalize(buffer, os.close, descriptor)
    return buffer, f"/proc/{os.getpid()}/fd/{descriptor}"


def shared_tensor(handle: list[Any], size: int) -> torch.Tensor:
    """The bucket of another process on this GPU, or on this host, uint8 [size]; it lives as long as the other one keeps
    it."""
    if len(handle) == 1:
        with open(handle[0], "rb") as file:
            return torch.frombuffer(mmap(file.fileno(), size, access=ACCESS_COPY), dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]


def unpacked(buffer: torch.Tensor, info: BucketContents) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view into `buffer`) of each tensor of the bucket."""
    for name, kind, shape, start in zip(info.names, info.dtypes, info.shapes, info.offsets, strict=True):
        dtype = getattr(torch, kind)
        end = start + dtype.itemsize * math.prod(shape)
        yield name, buffer[start:end].view(dtype).view(shape)
