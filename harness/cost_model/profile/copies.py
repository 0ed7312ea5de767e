"""Times of copies between a device and its host's memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.cost_model.profile.rows import Row
from harness.cost_model.profile.stopwatch import Stopwatch


def time_copies(sizes: tuple[int, ...], watch: Stopwatch) -> Iterator[Row]:
    """Copies of so many bytes, each way. The host's memory is pinned where the device is a GPU."""
    for size in sizes:
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")
        there = torch.zeros(size, dtype=torch.uint8, device=watch.device)
        seconds, spread = watch.time(lambda here=here, there=there: here.copy_(there))  # type: ignore[misc]
        yield Row("copy_to_host", 0, 0, 0, size, seconds, spread)
        seconds, spread = watch.time(lambda here=here, there=there: there.copy_(here))  # type: ignore[misc]
        yield Row("copy_to_device", 0, 0, 0, size, seconds, spread)
