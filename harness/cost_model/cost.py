"""How long simulated work lasts. Pure functions of `harness.config.CostConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.config import CostConfig
from harness.transfer_queue import Ragged

Transport = Literal["collective", "ipc", "host_staged"]


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of one weight update. send_s: the trainer waits; stage_s: on the way in the background, nobody waits;
    load_s: an engine waits."""

    send_s: float
    stage_s: float
    load_s: float


def transfer_times(cost: CostConfig, transport: Transport) -> TransferTimes:
    """What each transport of `harness.weight_sync` costs.

    collective: both sides at once, over the network. ipc: the trainer writes host memory, then engines read it.
    host_staged: the trainer copies to its host; the network in the background; then engines read their host's memory.
    """
    network_s = cost.weight_bytes / cost.network_bytes_per_s
    host_s = cost.weight_bytes / cost.host_bytes_per_s
    times = {
        "collective": TransferTimes(network_s + cost.sync_s, 0.0, network_s + cost.sync_s),
        "ipc": TransferTimes(host_s + cost.sync_s, 0.0, host_s + cost.sync_s),
        "host_staged": TransferTimes(host_s + cost.sync_s, network_s, host_s + cost.sync_s),
    }
    return times[transport]


def offload_s(cost: CostConfig) -> float:
    """Seconds to give a device back: the weights go to the host."""
    return cost.offload_s + cost.weight_bytes / cost.host_bytes_per_s


def reload_s(cost: CostConfig) -> float:
    """Seconds to take it again."""
    return cost.reload_s + cost.weight_bytes / cost.host_bytes_per_s


def largest_share_s(prompts: Ragged, responses: Ragged, ranks: int, *, s_per_token: float, s_per_pair: float) -> float:
    """Seconds of the slowest part when samples are cut into `ranks` contiguous parts of nearly equal counts.

    A sample of t tokens takes t s_per_token + t**2 s_per_pair. Both columns are run-length coded: the values of a row
    add up to its tokens.
    """
    before = _before(prompts) + _before(responses)
    lengths = before[1:] - before[:-1]
    cuts = np.arange(ranks + 1) * len(lengths) // ranks
    tokens, pairs = before[cuts], np.concatenate(([0], np.cumsum(lengths * lengths)))[cuts]
    return float(((tokens[1:] - tokens[:-1]) * s_per_token + (pairs[1:] - pairs[:-1]) * s_per_pair).max())


def _before(column: Ragged) -> np.ndarray:
    """Tokens before each row and after the last: int64 [rows + 1]."""
    return np.concatenate(([0], np.cumsum(column.values, dtype=np.int64)))[column.offsets]
