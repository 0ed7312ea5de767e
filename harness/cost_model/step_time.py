"""How long decode steps and prefill last on one rollout engine: closed forms, no state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.config import CostConfig

SAME_STEP = 1e-6  # of a step: nearer than this is the same moment, rounded


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """What decoding costs, as in `harness.config.CostConfig`. Seconds and tokens.

    A step of n samples whose contexts hold c tokens, before it, lasts a(n) + b c, with a(n) = step_s + max(weights_s,
    n per_sample_s) and b = per_cached_s. It makes every context longer by one, so k steps in a row last
    k (a(n) + b (c + n (k - 1) / 2)). kv_tokens: what the KV cache has room for; None is no limit.
    """

    step_s: float
    weights_s: float = 0.0
    per_sample_s: float = 0.0
    per_cached_s: float = 0.0
    prefill_s_per_token: float = 0.0
    prefill_s_per_pair: float = 0.0
    kv_tokens: int | None = None

    @classmethod
    def of(cls, cost: CostConfig) -> DecodeCost:
        return cls(
            step_s=cost.decode_step_s,
            weights_s=cost.decode_weights_s,
            per_sample_s=cost.decode_step_s_per_sample,
            per_cached_s=cost.decode_s_per_cached_token,
            prefill_s_per_token=cost.prefill_s_per_token,
            prefill_s_per_pair=cost.prefill_s_per_pair,
            kv_tokens=cost.kv_tokens,
        )

    def prefill(self, tokens: int) -> float:
        """Seconds to fill the cache with a context: every token attends to all before it."""
        return tokens * self.prefill_s_per_token + tokens * tokens * self.prefill_s_per_pair

    def steps(self, count: int, samples: int, cached: int) -> float:
        """Seconds of `count` steps in a row."""
        mean = cached + samples * (count - 1) / 2
        return count * (self.step_s + max(self.weights_s, samples * self.per_sample_s) + mean * self.per_cached_s)

    def steps_begun(self, seconds: float, samples: int, cached: int) -> int:
        """How many steps in a row are under way or done after so long; the first begins at once.

        `cached` is at least `samples`: no context is empty. The root of the quadratic may be rounded to either side.
        """
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
