"""The transfer plan: which tensors travel in which bucket, computed once and known to both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter: its name, full (unsharded) shape, dtype, and where its bytes start in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel together in one buffer of `bytes` bytes."""

    tensors: tuple[TensorSpec, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All buckets, in order. Sender and receiver walk it in step, so no name or shape is ever sent."""

    buckets: tuple[Bucket, ...]

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket: what a rank holds beyond its shards while it sends or receives."""
        return max(bucket.bytes for bucket in self.buckets)


_ALIGNMENT = 16  # bytes; every dtype can be viewed at such an offset


def plan_transfer(parameters: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> TransferPlan:
    """Fill buckets of at most `bucket_bytes` in the order given; a tensor larger than that travels alone.

    `parameters` yields (name, tensor or DTensor); only name, full shape and dtype are read.
    """
    buckets: list[Bucket] = []
    tensors: list[TensorSpec] = []
    end = 0
    for name, parameter in parameters:
        spec = TensorSpec(name, tuple(parameter.shape), parameter.dtype, end)
        if tensors and end + spec.bytes > bucket_bytes:
            buckets.append(Bucket(tuple(tensors), end))
            tensors, spec = [], TensorSpec(name, spec.shape, spec.dtype, 0)
        tensors.append(spec)
        end = -(-(spec.offset + spec.bytes) // _ALIGNMENT) * _ALIGNMENT
    if tensors:
        buckets.append(Bucket(tuple(tensors), end))
    return TransferPlan(tuple(buckets))


def pack(bucket: Bucket, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor | None) -> None:
    """Gather each parameter of the bucket and copy it into `buffer` (uint8 [>= bucket.bytes]).

    Gathering a DTensor is a collective of the training world, so every rank calls this; those that do not send pass
    None and keep nothing.
    """
    for spec in bucket.tensors:
        full = gathered(parameters[spec.name])
        if buffer is not None:
            _view(buffer, spec).copy_(full)


def unpack(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view into `buffer`) for each parameter of the bucket; copy before the buffer is filled again."""
    for spec in bucket.tensors:
        yield spec.name, _view(buffer, spec)


def _view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return buffer[spec.offset : spec.offset + spec.bytes].view(spec.dtype).view(spec.shape)


def gathered(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter, without its graph. For a DTensor this is a collective: every rank calls it."""
    from torch.distributed.tensor import DTensor

    data = parameter.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data
