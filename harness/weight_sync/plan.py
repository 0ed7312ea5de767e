"""The transfer plan: which tensors travel in which bucket, computed once and known to both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from harness.weight_sync.gather import gather_into, whole


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
    """Parameters that travel together, in `bytes` bytes."""

    tensors: tuple[TensorSpec, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All buckets, in order. Sender and receiver walk it in step, so no name or shape is ever sent.

    checked: every tensor travels with its digest, and is held against it before anybody gets to see it.
    """

    buckets: tuple[Bucket, ...]
    checked: bool = False

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket: transports hold two of them, one that is filled and one that travels."""
        return max(bucket.bytes for bucket in self.buckets)

    @property
    def most_tensors(self) -> int:
        """Of any bucket."""
        return max(len(bucket.tensors) for bucket in self.buckets)


_ALIGNMENT = 16  # bytes; every dtype can be viewed at such an offset
_LARGE = 1 << 20  # bytes from which a tensor is a piece by itself: then it needs no copy to be sent


def plan_transfer(
    parameters: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int, checked: bool = False
) -> TransferPlan:
    """Fill buckets of at most `bucket_bytes` in the order given; a tensor larger than that travels alone.

    `parameters` yields (name, tensor or DTensor); only name, full shape and dtype are read.
    """
    buckets: list[Bucket] = []
    tensors: list[TensorSpec] = []
    end = 0
    for name, parameter in parameters:
        spec = TensorSpec(name, tuple(parameter.shape), parameter.dtype, -(-end // _ALIGNMENT) * _ALIGNMENT)
        if tensors and spec.offset + spec.bytes > bucket_bytes:
            buckets.append(Bucket(tuple(tensors), end))
            tensors, spec = [], TensorSpec(name, spec.shape, spec.dtype, 0)
        tensors.append(spec)
        end = spec.offset + spec.bytes
    if tensors:
        buckets.append(Bucket(tuple(tensors), end))
    return TransferPlan(tuple(buckets), checked)


def pack(bucket: Bucket, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor | None) -> None:
    """Bring each parameter of the bucket into `buffer` (uint8 [>= bucket.bytes]).

    Gathering a DTensor is a collective of the training world, so every rank calls this; those that do not send pass
    None and keep nothing.
    """
    for spec in bucket.tensors:
        _place(spec, parameters[spec.name], buffer)


def pieces(bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    """In what pieces the bytes of the bucket travel, uint8 views into `buffer`, in order: a large tensor is one by
    itself, and smaller ones between two such go together."""
    return [buffer[part[0].offset : part[-1].offset + part[-1].bytes] for part in _parts(bucket)]


def outgoing(bucket: Bucket, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> list[torch.Tensor]:
    """The `pieces` with the parameters in them, on the device of `buffer`: a large tensor that lies there ready is
    taken where it lies, everything else is brought into `buffer`."""
    ready = []
    for part, piece in zip(_parts(bucket), pieces(bucket, buffer), strict=True):
        alone = whole(parameters[part[0].name]) if part[0].bytes >= _LARGE else None
        if alone is not None and alone.device == buffer.device and alone.is_contiguous():
            ready.append(alone.view(-1).view(torch.uint8))
            continue
        for spec in part:
            _place(spec, parameters[spec.name], buffer)
        ready.append(piece)
    return ready


def _parts(bucket: Bucket) -> list[list[TensorSpec]]:
    parts: list[list[TensorSpec]] = []
    for spec in bucket.tensors:
        if parts and max(spec.bytes, parts[-1][-1].bytes) < _LARGE:
            parts[-1].append(spec)
        else:
            parts.append([spec])
    return parts


def _place(spec: TensorSpec, parameter: torch.Tensor, buffer: torch.Tensor | None) -> None:
    place = None if buffer is None else _view(buffer, spec)
    there = whole(parameter)
    if there is None:
        gather_into(parameter, place)
    elif place is not None:
        place.copy_(there, non_blocking=place.is_pinned())


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
