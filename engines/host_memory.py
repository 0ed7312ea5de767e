"""Memory of the host that GPUs copy from and to."""

from collections.abc import Sequence

import torch

BLOCK = 4 << 30
"""Bytes of pinned memory that are asked for at once, at most: a power of two."""

_ALIGNED = 256


def host_buffers(sizes: Sequence[int], *, pinned: bool) -> list[torch.Tensor]:
    """Memory for so many bytes each, uint8 [size]. pinned: for copies at the speed of the link.

    torch rounds what it pins up to a power of two, tensor by tensor (ATen/core/CachingHostAllocator.h): the moments of
    a 7B model would take twice their bytes. So they share blocks, each filled by tensors that follow each other.
    """
    rooms = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    blocks: list[int] = []
    for room in rooms:
        if blocks and blocks[-1] + room <= BLOCK:
            blocks[-1] += room
        else:
            blocks.append(room)
    memory = iter([torch.empty(block, dtype=torch.uint8, pin_memory=pinned) for block in blocks])
    found: list[torch.Tensor] = []
    left: torch.Tensor | None = None
    for size, room in zip(sizes, rooms, strict=True):
        if left is None or left.numel() < room:
            left = next(memory)
        found.append(left[:size])
        left = left[room:]
    return found
