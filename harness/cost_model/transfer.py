"""How the weights of a job travel, by its settings: in buckets of which size, and through how many links at once."""

from __future__ import annotations

from harness.config import JobConfig
from harness.config.communicators import sending_ranks
from harness.cost_model.shape import weight_bytes

LEAST_BUCKET, LARGEST_BUCKET = 64 << 20, 1 << 30
"""Bytes. To start a bucket is taken to last 100 us, of a broadcast and of what Python does: as long as NVLink takes for
36 MB of it, so that a GiB loses 3 % there. More wins nothing; the first bucket is filled before anything is sent."""
_EACH = 4  # buckets of a sender, at least: it fills one while another travels


def bucket_sizes(config: JobConfig, transport: str, training_ranks: int) -> list[int]:
    """Bytes that a bucket of weights may have, powers of two from the best to the smallest: as large as is any use, so
    that every training rank which sends has several."""
    most = weight_bytes(config.model) / (_EACH * sending_ranks(transport, training_ranks))
    sizes = [LEAST_BUCKET]
    while 2 * sizes[-1] <= min(most, LARGEST_BUCKET):
        sizes.append(2 * sizes[-1])
    return sizes[::-1]


def sender_links(config: JobConfig, transport: str, training_ranks: int, engine_devices: int) -> float:
    """Links to host memory by which the trainer's copies go, for each one of an engine's: every training rank that
    sends has one, and so has every device of an engine."""
    buckets = -int(-weight_bytes(config.model) // config.cluster.bucket_bytes)
    return sending_ranks(transport, training_ranks, buckets) / engine_devices
