"""How the weights of a job travel, by its settings: in buckets of which size, and through how many links at once."""

import math
from dataclasses import dataclass

from harness.config import DeviceConfig, JobConfig, RooflineConfig
from harness.config.placement import sending_ranks
from harness.cost_model.shape import sent_bytes

LEAST_BUCKET, LARGEST_BUCKET = 64 << 20, 1 << 30
"""Bytes. To start a bucket is taken to last 100 us, of a broadcast and of what Python does: as long as NVLink takes for
36 MB of it, so that a GiB loses 3 % there. More wins nothing; the first bucket is filled before anything is sent."""
_EACH = 4  # buckets of a sender, at least: it fills one while another travels


def bucket_sizes(config: JobConfig, transport: str, training_ranks: int) -> list[int]:
    """Bytes that a bucket of weights may have, powers of two from the best to the smallest: as large as is any use, so
    that every training rank which sends has several."""
    most = sent_bytes(config.model, config.training) / (_EACH * sending_ranks(transport, training_ranks))
    sizes = [LEAST_BUCKET]
    while 2 * sizes[-1] <= min(most, LARGEST_BUCKET):
        sizes.append(2 * sizes[-1])
    return sizes[::-1]


def sender_links(config: JobConfig, transport: str, training_ranks: int, engine_devices: int) -> float:
    """Links to host memory by which the trainer's copies go, for each one of an engine's: every training rank that
    sends has one, and so has every device of an engine."""
    buckets = -int(-sent_bytes(config.model, config.training) // config.cluster.bucket_bytes)
    return sending_ranks(transport, training_ranks, buckets) / engine_devices


@dataclass(frozen=True)
class StagedParts:
    """Seconds of the parts of one transfer by host_staged. gather_s, copy_s: the trainer waits while shards are brought
    to those that send, and from there to their hosts. send_s, take_s: meanwhile nothing waits; what leaves the link of
    one that sends, and what an engine takes in."""

    gather_s: float
    copy_s: float
    send_s: float
    take_s: float

    @property
    def waiting_s(self) -> float:
        """Seconds for which the trainer waits."""
        return self.gather_s + self.copy_s

    @property
    def background_s(self) -> float:
        """Seconds in the background: both parts go on at once, bucket by bucket."""
        return max(self.send_s, self.take_s)


def staged_parts(
    weights: float, ranks: int, engines: int, senders: int, device: DeviceConfig, factors: RooflineConfig
) -> StagedParts:
    """Times of a transfer of `weights` bytes, sharded over `ranks` training devices and sent by `senders` of them to
    engines in other nodes, each of which has one process that takes them in.

    Shards come by the link from the same node, and by the network from others. Gloo's broadcast is a binomial tree
    (gloo/broadcast.cc): of n members the first one sends log2(n) copies, rounded up, and the others pass on the rest,
    less than one each, since their places differ from sender to sender."""
    network = device.network_bytes_per_s * factors.network_share
    near, share = min(ranks, device.per_node), weights / senders
    by_link = (near - 1) / ranks * share / (device.link_bytes_per_s * factors.network_share)
    by_network = (ranks - near) / ranks * share / network
    return StagedParts(
        gather_s=max(by_link, by_network),
        copy_s=share / (device.host_bytes_per_s * factors.host_share),
        send_s=share * math.ceil(math.log2(engines + 1)) / network,
        take_s=weights / network,
    )
