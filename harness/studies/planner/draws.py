"""What the job has to compute: the response lengths of its first batches, as its run will draw them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from harness.config import JobConfig
from harness.cost_model.lengths import Lengths


@dataclass(frozen=True, eq=False)
class Draws:
    """lengths: response tokens, int64 [batches, samples of a batch], in the order of sample ids. prompt: tokens."""

    lengths: np.ndarray
    prompt: int
    group_size: int

    @classmethod
    def of(cls, config: JobConfig, seed: int, batches: int) -> Draws:
        algorithm, cost = config.algorithm, config.cost
        lengths = Lengths(cost.lengths, seed, algorithm.group_size).batches(0, batches, algorithm.batch_samples)
        return cls(lengths, cost.prompt_tokens, algorithm.group_size)

    @cached_property
    def tokens(self) -> float:
        """Response tokens of a batch, a mean over batches."""
        return float(self.lengths.sum(axis=1).mean())

    @cached_property
    def samples(self) -> int:
        """Of a batch."""
        return int(self.lengths.shape[1])

    @cached_property
    def batches(self) -> int:
        return int(self.lengths.shape[0])

    @cached_property
    def cached_steps(self) -> float:
        """Tokens in the KV caches, summed over the decode steps of a batch: a response's k-th step reads its prompt and
        the k - 1 tokens before."""
        its = self.lengths.astype(np.float64)
        return float((its * self.prompt + its * (its - 1) / 2).sum(axis=1).mean())

    @lru_cache(maxsize=64)  # noqa: B019  # Draws live as long as a search
    def longest(self, first_group: int = 0) -> int:
        """The longest response of a batch, its groups from `first_group` on; of that batch in which it is shortest.
        0 where there are none."""
        its = self.lengths[:, first_group * self.group_size :]
        return int(its.max(axis=1).min()) if its.size else 0

    def slowest_s(self, rows: int, parts: int, *, s_per_token: float, s_per_pair: float) -> np.ndarray:
        """Seconds of every micro-batch of `rows` samples: float [batches, micro-batches].

        It is cut into contiguous parts of nearly equal counts, and waits for the slowest: a sample of t tokens, prompt
        and response, takes t s_per_token + t**2 s_per_pair. As `harness.cost_model.cost.largest_share_s`.
        """
        tokens, pairs, begins = self._cut(rows, parts)
        seconds: np.ndarray = np.maximum.reduceat(tokens * s_per_token + pairs * s_per_pair, begins, axis=1)
        return seconds

    @lru_cache(maxsize=1024)  # noqa: B019  # Draws live as long as a search
    def _cut(self, rows: int, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and squares of lengths of all parts, [batches, parts], and the first part of each micro-batch."""
        lengths = self.lengths + self.prompt
        first = np.arange(0, self.samples, rows)
        here = np.minimum(rows, self.samples - first)
        cuts = np.unique(first[:, None] + np.arange(parts) * here[:, None] // parts)
        tokens = np.add.reduceat(lengths, cuts, axis=1)
        return tokens, np.add.reduceat(lengths * lengths, cuts, axis=1), np.searchsorted(cuts, first)
