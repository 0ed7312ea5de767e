"""One parameter from the shards of all training ranks, to the one that sends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # takes most of a second to load, and only training ranks need it


def whole(parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter where this rank holds all of it, not copied and without its graph; None where it has a shard."""
    from torch.distributed.tensor import DTensor

    data = parameter.detach()
    if not isinstance(data, DTensor):
        return data
    return data.to_local() if data.device_mesh.size() == 1 else None


def gather_into(parameter: torch.Tensor, place: torch.Tensor | None) -> None:
    """Bring a DTensor into `place` (its full shape) on the first rank; the others give None, and keep nothing.

    A collective of the training world. Rows dealt out over one mesh dimension go straight from their shards to their
    place. Any other layout is gathered as torch does it: then every rank holds this one tensor for a moment, and so
    does the first where its place is on another device.
    """
    from torch.distributed.tensor import DTensor, Shard

    data = parameter.detach()
    assert isinstance(data, DTensor), "a shard has others to be gathered with"
    if data.device_mesh.ndim == 1 and data.placements == (Shard(0),):
        _rows_into(data, place)
        return
    full = data.full_tensor()
    if place is not None:
        place.copy_(full)


def _rows_into(data: DTensor, place: torch.Tensor | None) -> None:
    local, group = data.to_local(), data.device_mesh.get_group()
    if place is None:
        _exchange([dist.P2POp(dist.isend, local.contiguous(), dist.get_global_rank(group, 0), group)], local.numel())
        return
    there = place if place.device == local.device else torch.empty(data.shape, dtype=data.dtype, device=local.device)
    rows, ranks = data.shape[0], dist.get_world_size(group)
    most = -(-rows // ranks)  # as torch.chunk deals them out: the last ranks may have fewer, or none
    there[: local.shape[0]].copy_(local)
    for rank in range(1, ranks):
        part = there[min(rows, rank * most) : (rank + 1) * most]
        _exchange([dist.P2POp(dist.irecv, part, dist.get_global_rank(group, rank), group)], part.numel())
    if there is not place:
        place.copy_(there)


def _exchange(operations: list[dist.P2POp], numbers: int) -> None:
    """Nothing is sent where a rank has no rows, or a row no numbers."""
    if numbers:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
