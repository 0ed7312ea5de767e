"""The transfer plan, how parameters get from their shards into its buckets, and how arrival is checked.

The plan says which tensors travel in which bucket. It is computed once and known to both sides, so no name or shape is
ever sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from harness.protocols import TransferError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter: its name, full (unsharded) shape, dtype, and where its bytes start in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel together, in `bytes` bytes. holders: training ranks that have them, or shards of them; ()
    is all ranks."""

    tensors: tuple[TensorSpec, ...]
    bytes: int
    holders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All buckets, in order; sender and receiver walk it in step.

    checked: every tensor travels with its digest, and is verified against it before an engine gets it. delta: of what
    receivers hold already, only what changed travels; then all is checked.
    """

    buckets: tuple[Bucket, ...]
    checked: bool = False
    delta: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def in_stages(self) -> bool:
        """Whether some ranks have nothing of some parameters."""
        return any(bucket.holders for bucket in self.buckets)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket: transports hold two of them, one that is filled and one that travels."""
        return max(bucket.bytes for bucket in self.buckets)

    @property
    def most_tensors(self) -> int:
        """Tensors of the bucket that has most."""
        return max(len(bucket.tensors) for bucket in self.buckets)

    def owners(self, senders: int) -> tuple[int, ...]:
        """The sender of each bucket among so many: in their order, each goes to the one with the fewest bytes so far,
        so that all send as much, and any few buckets in a row are of different ones; to one that has it, where one of
        them does."""
        bytes_of, owners = [0] * senders, []
        for bucket in self.buckets:
            able = [rank for rank in bucket.holders if rank < senders] or range(senders)
            owner = min(able, key=lambda rank: bytes_of[rank])
            bytes_of[owner] += bucket.bytes
            owners.append(owner)
        return tuple(owners)


_ALIGNMENT = 16  # bytes; every dtype can be viewed at such an offset
_LARGE = 1 << 20  # bytes from which a tensor is a piece by itself: then it needs no copy to be sent
_TOGETHER = 16 << 20  # bytes of smaller tensors that are gathered at once
Holders = Mapping[str, tuple[int, ...]]
"""Training ranks that have a parameter, or a shard of it, by its name; those that all have are left out."""


def plan_transfer(
    parameters: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    checked: bool = False,
    delta: bool = False,
    holders: Holders | None = None,
) -> TransferPlan:
    """Fill buckets of at most `bucket_bytes` in the order given, none of parameters that different ranks have; a tensor
    larger than that travels alone.

    `parameters` yields (name, tensor or DTensor); only name, full shape and dtype are read.
    """
    buckets: list[Bucket] = []
    tensors: list[TensorSpec] = []
    end, those = 0, tuple[int, ...]()
    for name, parameter in parameters:
        spec = TensorSpec(name, tuple(parameter.shape), parameter.dtype, -(-end // _ALIGNMENT) * _ALIGNMENT)
        here = (holders or {}).get(name, ())
        if tensors and (spec.offset + spec.bytes > bucket_bytes or here != those):
            buckets.append(Bucket(tuple(tensors), end, those))
            tensors, spec = [], TensorSpec(name, spec.shape, spec.dtype, 0)
        tensors.append(spec)
        end, those = spec.offset + spec.bytes, here
    if tensors:
        buckets.append(Bucket(tuple(tensors), end, those))
    return TransferPlan(tuple(buckets), checked or delta, delta)


# -- into buckets and out of them


def pack(bucket: Bucket, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor | None, owner: int = 0) -> None:
    """Bring each parameter of the bucket into `buffer` (uint8 [>= bucket.bytes]) of training rank `owner`.

    Gathering a DTensor is a collective of the training world, so every rank calls this; those that do not send this
    bucket pass None and keep nothing. An owner that has none of it gets it from the first rank that does. Into pinned
    memory it may still be copied when this returns; the next call waits for that, so that no more than a bucket of
    gathered tensors waits on a device.
    """
    if buffer is not None and buffer.is_pinned():
        torch.cuda.synchronize()
    if bucket.holders and owner not in bucket.holders:
        _pack_for(owner, bucket, parameters, buffer)
    elif not bucket.holders or dist.get_rank() in bucket.holders:
        for spec in bucket.tensors:
            _place(spec, parameters[spec.name], buffer, owner)


def _pack_for(owner: int, bucket: Bucket, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor | None) -> None:
    """Bring a bucket to an owner that holds none of it: its first holder packs it, and passes it on."""
    rank, first = dist.get_rank(), bucket.holders[0]
    passed = torch.empty(bucket.bytes, dtype=torch.uint8, device=_device_of_world()) if rank in (first, owner) else None
    if rank in bucket.holders:
        pack(bucket, parameters, passed, first)
    if passed is not None and rank == first:
        dist.send(passed, owner)
    elif passed is not None and buffer is not None:
        dist.recv(passed, first)
        buffer[: bucket.bytes].copy_(passed)


def unpack(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view into `buffer`) for each parameter of the bucket; copy before the buffer is filled again."""
    for spec in bucket.tensors:
        yield spec.name, _view(buffer, spec)


def pieces(bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Pieces in which the bytes of the bucket travel, uint8 views into `buffer`, in order: a large tensor is one by
    itself, and smaller ones between two such go together."""
    return [buffer[part[0].offset : part[-1].offset + part[-1].bytes] for part in _parts(bucket)]


def outgoing(
    bucket: Bucket, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor, owner: int = 0
) -> list[torch.Tensor]:
    """The `pieces` with the parameters in them, on the device of `buffer`, which is of training rank `owner`: a large
    tensor that is there already is sent from where it lies, everything else is brought into `buffer`."""
    ready = []
    for part, piece in zip(_parts(bucket), pieces(bucket, buffer), strict=True):
        alone = _unsharded(parameters[part[0].name]) if part[0].bytes >= _LARGE else None
        if alone is not None and alone.device == buffer.device and alone.is_contiguous():
            ready.append(alone.view(-1).view(torch.uint8))
            continue
        for spec in part:
            _place(spec, parameters[spec.name], buffer, owner)
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


def _view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return buffer[spec.offset : spec.offset + spec.bytes].view(spec.dtype).view(spec.shape)


def _place(spec: TensorSpec, parameter: torch.Tensor, buffer: torch.Tensor | None, owner: int) -> None:
    place = None if buffer is None else _view(buffer, spec)
    full = _unsharded(parameter)
    if full is None:
        _gather_into(parameter, place, owner)
    elif place is not None:
        place.copy_(full, non_blocking=place.is_pinned())


# -- from shards


def all_gathered(parameters: Mapping[str, torch.Tensor], holders: Holders) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full parameter) of each, without its graph. Every rank of the world goes through them: where each has a
    part, that is a collective, which small ones share; what only `holders` have is sent to the others."""
    for names in _together(parameters):
        if len(names) == 1:
            yield names[0], _gathered(parameters[names[0]], holders.get(names[0], ()))
        else:
            shards = [cast("DTensor", parameters[name].detach()) for name in names]
            yield from zip(names, _gathered_at_once(shards), strict=True)


def _together(parameters: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names in their order: of small parameters of one dtype, that every rank has a part of, several at once."""
    from torch.distributed.tensor import DTensor

    names, dtype, size = list[str](), None, 0
    for name, parameter in parameters.items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        small = mesh is not None and 1 < mesh.size() == dist.get_world_size() and parameter.nbytes < _LARGE
        if names and (not small or parameter.dtype != dtype or size + parameter.nbytes > _TOGETHER):
            yield names
            names, size = [], 0
        if not small:
            yield [name]
            continue
        names.append(name)
        dtype, size = parameter.dtype, size + parameter.nbytes
    if names:
        yield names


def _gathered_at_once(parameters: Sequence[DTensor]) -> list[torch.Tensor]:
    """The full parameters, all of one dtype, by one collective of the world."""
    from engines.torch.first_weights import parts_of_ranks

    full = [parameter.to_local().new_empty(parameter.shape) for parameter in parameters]
    parts = [
        [whole[parts_of_ranks(parameter)[rank]] for whole, parameter in zip(full, parameters, strict=True)]
        for rank in range(dist.get_world_size())
    ]
    counts = [[part.numel() for part in of_rank] for of_rank in parts]
    longest = max(map(sum, counts))
    own = torch.cat([parameter.to_local().reshape(-1) for parameter in parameters])
    come = [own.new_empty(longest) for _ in parts]
    dist.all_gather(come, torch.nn.functional.pad(own, (0, longest - len(own))))
    for of_rank, count, row in zip(parts, counts, come, strict=True):
        for part, numbers in zip(of_rank, row[: sum(count)].split(count), strict=True):
            part.copy_(numbers.view_as(part))
    return full


def _gathered(parameter: torch.Tensor, holders: Sequence[int]) -> torch.Tensor:
    """The full parameter, without its graph. For a DTensor this is a collective, and where only some ranks, `holders`,
    have it: then every rank calls it."""
    from torch.distributed.tensor import DTensor

    data = parameter.detach()
    if not holders or dist.get_rank() in holders:
        full = data.full_tensor() if isinstance(data, DTensor) else data
    else:
        full = torch.empty(data.shape, dtype=data.dtype, device=_device_of_world())
    if holders:
        dist.broadcast(full, holders[0])
    return full


def _device_of_world() -> torch.device:
    """The device of the tensors that the training world exchanges."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _unsharded(parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter where this rank holds all of it, not copied and without its graph; None where it has a shard."""
    from torch.distributed.tensor import DTensor

    data = parameter.detach()
    if not isinstance(data, DTensor):
        return data
    return data.to_local() if data.device_mesh.size() == 1 else None


def _gather_into(parameter: torch.Tensor, place: torch.Tensor | None, owner: int) -> None:
    """Bring a DTensor into `place` (its full shape) on rank `owner`; the others give None, and keep nothing.

    A collective of the ranks that hold it. The owner takes parts in turn, from the rank after it on, of each part the
    first that it comes to: ranks that have given theirs go on to the next bucket, so those of several owners are
    gathered at once, each a step behind the one before.
    """
    from torch.distributed.tensor import DTensor

    from engines.torch.first_weights import parts_of_ranks

    data = parameter.detach()
    assert isinstance(data, DTensor), "only a sharded parameter is gathered"
    local, parts, here = data.to_local(), parts_of_ranks(data), dist.get_rank()
    ranks, holders = list(parts), dict[Any, int]()
    for rank in ranks[ranks.index(owner) :] + ranks[: ranks.index(owner)]:
        holders.setdefault(tuple((cut.start, cut.stop) for cut in parts[rank]), rank)
    if place is None:
        if here in holders.values():
            _exchange(dist.isend, local.contiguous(), owner)
        return
    full = place if place.device == local.device else torch.empty(data.shape, dtype=data.dtype, device=local.device)
    full[parts[here]].copy_(local)
    for rank in holders.values():
        if rank == here:
            continue
        part = full[parts[rank]]
        come = part if part.is_contiguous() else torch.empty_like(part)
        _exchange(dist.irecv, come, rank)
        if come is not part:
            part.copy_(come)
    if full is not place:
        _bring(full, place)


def _bring(full: torch.Tensor, place: torch.Tensor) -> None:
    """Copy what was gathered. From a GPU into pinned memory on a stream of its own: on the current one, this rank's
    shards of the next bucket would not leave before, and no two ranks would copy at once."""
    if not (full.is_cuda and place.is_pinned()):
        place.copy_(full)
        return
    copies = _copies(full.device)
    copies.wait_stream(torch.cuda.current_stream(full.device))
    with torch.cuda.stream(copies):
        place.copy_(full, non_blocking=True)
    full.record_stream(copies)  # its memory is not given to others before


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies from this device to pinned memory."""
    return torch.cuda.Stream(device)


def _exchange(operation: Callable[..., Any], rows: torch.Tensor, rank: int) -> None:
    """Exchange a part with another rank of the world; nothing is sent where there are no numbers."""
    if rows.numel():
        for work in dist.batch_isend_irecv([dist.P2POp(operation, rows, rank)]):
            work.wait()


# -- digests

_WORD, _BLOCK = 8, 4096  # bytes of a word, words of a block


def digests(bucket: Bucket, data: torch.Tensor) -> torch.Tensor:
    """int64 [tensors of the bucket], on the device of `data` (uint8 [>= bucket.bytes])."""
    return torch.stack([digest(data[spec.offset : spec.offset + spec.bytes]) for spec in bucket.tensors])


def digest(data: torch.Tensor) -> torch.Tensor:
    """int64 [] of uint8 [n]; `data` starts at a multiple of 8 bytes.

    A weighted sum of the 64-bit words, modulo 2^64, computed where the tensor is. Every block of words has an odd
    weight of its own, so one wrong word always changes the digest, and so do two blocks that changed places. It is no
    protection against forgery.
    """
    words = data.numel() // _WORD
    blocks = words // _BLOCK
    whole = data[: words * _WORD].view(torch.int64)
    sums = [
        whole[: blocks * _BLOCK].view(blocks, _BLOCK).sum(1),
        whole[blocks * _BLOCK :].sum()[None],
        data[words * _WORD :].to(torch.int64).mul(_odd(data.numel() - words * _WORD, data.device)).sum()[None],
    ]
    parts = torch.cat(sums)
    return (parts * _odd(len(parts), data.device)).sum() + data.numel()


def verify(bucket: Bucket, data: torch.Tensor, expected: torch.Tensor, version: int) -> None:
    """Raises TransferError naming the tensors that differ from what was sent."""
    same = (digests(bucket, data) == expected.to(data.device)).tolist()
    damaged = [spec.name for spec, fine in zip(bucket.tensors, same, strict=True) if not fine]
    if damaged:
        raise TransferError(f"version {version} arrived damaged: {', '.join(damaged)}")


def _odd(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * count + 1, 2, dtype=torch.int64, device=device)
