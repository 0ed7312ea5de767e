"""How long simulated decode steps, prefill, micro-batches and transfers last: pure functions of `CostConfig`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from harness.config import BytesCost, CostConfig, TransferCost
from harness.config.transports import TransferTimes, transport_of
from harness.transfer_queue import Ragged
from harness.transfer_queue.control.policies import balanced

SAME_STEP = 1e-6  # of a step: nearer than this is the same moment, rounded


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Costs of decoding, as in `harness.config.CostConfig`, in seconds and tokens.

    A step of n samples whose contexts hold c tokens, before it, lasts a(n) + b c, with a(n) = step_s + max(weights(n),
    n per_sample_s) and b = per_cached_s. It makes every context longer by one, so k steps in a row last
    k (a(n) + b (c + n (k - 1) / 2)). kv_tokens: what the KV cache has room for; None is no limit. step_tokens,
    prefix_caching: as in `harness.config.SystemConfig`."""

    step_s: float
    weights_s: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 1.0
    per_sample_s: float = 0.0
    per_cached_s: float = 0.0
    prefill_s_per_token: float = 0.0
    prefill_s_per_pair: float = 0.0
    kv_tokens: int | None = None
    step_tokens: int | None = None
    prefix_caching: bool = False

    @classmethod
    def of(cls, cost: CostConfig) -> Self:
        """The costs of decoding in a job's costs."""
        return cls(
            step_s=cost.decode_step_s,
            weights_s=cost.decode_weights_s,
            experts_s=cost.decode_experts_s,
            expert_share=cost.expert_share,
            per_sample_s=cost.decode_step_s_per_sample,
            per_cached_s=cost.decode_s_per_cached_token,
            prefill_s_per_token=cost.prefill_s_per_token,
            prefill_s_per_pair=cost.prefill_s_per_pair,
            kv_tokens=cost.kv_tokens,
            step_tokens=cost.step_tokens,
            prefix_caching=cost.prefix_caching,
        )

    def prefill(self, tokens: int) -> float:
        """Seconds to fill the cache with a context: every token attends to all before it."""
        return tokens * self.prefill_s_per_token + tokens * tokens * self.prefill_s_per_pair

    def weights(self, tokens: float) -> float:
        """Seconds in which a step of so many tokens reads its weights: all but experts, and of E experts, of which each
        token goes through e by itself, 1 - (1 - e / E)^n; of one that is left out by all n nothing is read."""
        return self.weights_s + self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)

    def joined_s(self, prefill_s: float, tokens: int, samples: int) -> float:
        """Seconds by which a step of so many samples gets longer by a prefill of so many tokens, and of `prefill_s` by
        itself: all of it where steps are for one or the other; else both are one pass, whose products hide as far as
        reading the weights takes longer (Sarathi: Agrawal et al., arXiv 2308.16369, section 4.2)."""
        if self.step_tokens is None or not tokens:
            return prefill_s
        products_s = samples * self.per_sample_s
        return max(self.weights(samples + tokens), products_s + prefill_s) - max(self.weights(samples), products_s)

    def steps(self, count: int, samples: int, cached: int) -> float:
        """Seconds of `count` steps in a row."""
        mean = cached + samples * (count - 1) / 2
        return count * (
            self.step_s + max(self.weights(samples), samples * self.per_sample_s) + mean * self.per_cached_s
        )

    def steps_begun(self, seconds: float, samples: int, cached: int) -> int:
        """How many steps in a row are under way or done after so long; the first begins at once. `cached` is at least
        `samples`: no context is empty. The root of the quadratic may be rounded to either side."""
        first, growth = self.steps(1, samples, cached), samples * self.per_cached_s
        seconds -= SAME_STEP * first
        if seconds <= 0:
            return 1
        half = first - growth / 2
        count = max(1, math.ceil(2 * seconds / (half + math.sqrt(half * half + 2 * growth * seconds))))
        while self.steps(count, samples, cached) < seconds:
            count += 1
        while count > 1 and self.steps(count - 1, samples, cached) >= seconds:
            count -= 1
        return count


def transfer_times(cost: CostConfig, transport: str, sender_links: float = 1.0, ranks: int = 1) -> TransferTimes:
    """Times of a transport from so many training ranks: as it was timed from the largest number of ranks that is not
    above, or where it was not timed, as it says itself by speeds. sender_links: to host memory, of the training ranks
    that send, for each one of an engine's. Over the network they gain nothing: an engine takes in all of the weights,
    however many send them."""
    timed = [each for each in cost.transfers if each.transport == transport and each.ranks <= ranks]
    if timed:
        return _timed(cost, max(timed, key=lambda each: each.ranks))
    return transport_of(transport).times(cost, sender_links)


def _timed(cost: CostConfig, transfer: TransferCost) -> TransferTimes:
    """Times of a timed transfer, until the receiver has the weights; what an engine does beyond is in sync_s."""

    def lasts(part: BytesCost | None) -> float:
        return part.fixed_s + cost.weight_bytes / part.bytes_per_s if part else 0.0

    return TransferTimes(lasts(transfer.send), lasts(transfer.stage), lasts(transfer.load) + cost.sync_s)


def offload_s(cost: CostConfig) -> float:
    """Seconds to give a device back: the weights go to the host."""
    return cost.offload_s + cost.weight_bytes / cost.host_bytes_per_s


def reload_s(cost: CostConfig) -> float:
    """Seconds to take it again."""
    return cost.reload_s + cost.weight_bytes / cost.host_bytes_per_s


def sample_tokens(prompts: Ragged, responses: Ragged) -> NDArray[np.int64]:
    """Tokens of each sample, int64 [samples]. Both columns are run-length coded: a row's values are its tokens."""
    before = _before(prompts) + _before(responses)
    return before[1:] - before[:-1]


def rank_shares(
    lengths: NDArray[np.int64], ranks: int, group_size: int, dealing: str = "balanced"
) -> list[NDArray[np.int64]]:
    """Tokens of each sample of a micro-batch, int64 [samples], by rank of those that share it, in whole groups where
    these divide by the ranks, else sample by sample: as Cadence's queue deals (harness/workers/dataflow.py), or in
    order."""
    if ranks == 1:
        return [lengths]
    units = lengths.reshape(-1, unit_samples(len(lengths), ranks, group_size))
    dealt = (
        balanced(units.sum(axis=1), ranks) if dealing == "balanced" else np.array_split(np.arange(len(units)), ranks)
    )
    return [units[share].ravel() for share in dealt]


def unit_samples(samples: int, ranks: int, group_size: int) -> int:
    """How many of so many samples go to a rank together."""
    return 1 if samples % (group_size * ranks) else group_size


def slowest_share_s(shares: Sequence[NDArray[np.int64]], *, s_per_token: float, s_per_pair: float) -> float:
    """Seconds of the slowest share, where a sample of t tokens takes t s_per_token + t**2 s_per_pair."""
    return max(float(share.sum() * s_per_token + (share * share).sum() * s_per_pair) for share in shares)


def _before(column: Ragged) -> np.ndarray:
    """Tokens before each row and after the last: int64 [rows + 1]."""
    return np.concatenate(([0], np.cumsum(column.values, dtype=np.int64)))[column.offsets]
