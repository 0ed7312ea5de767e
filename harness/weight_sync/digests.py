"""A number for each tensor of a bucket, by which the other end can tell whether it arrived as it left.

A digest is a weighted sum of the tensor's 64-bit words, modulo 2^64, computed where the tensor is. Blocks of words have
odd weights of their own, so that one wrong word always changes it, and so does any block that comes in another's place.
It is no protection against somebody who forges weights on purpose.
"""

from __future__ import annotations

import torch

from harness.weight_sync.errors import TransferError
from harness.weight_sync.plan import Bucket

_WORD, _BLOCK = 8, 4096  # bytes of a word, words of a block


def digests(bucket: Bucket, data: torch.Tensor) -> torch.Tensor:
    """int64 [tensors of the bucket], on the device of `data` (uint8 [>= bucket.bytes])."""
    return torch.stack([digest(data[spec.offset : spec.offset + spec.bytes]) for spec in bucket.tensors])


def digest(data: torch.Tensor) -> torch.Tensor:
    """int64 [] of uint8 [n]; `data` starts at a multiple of 8 bytes."""
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
