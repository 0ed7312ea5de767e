"""Batches of responses with log-probs of the policies that a loss compares: random ones, and extreme ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from harness.config import AlgorithmConfig
from harness.rl.aggregation import aggregation_of

RANDOM, EXTREME = 200, 50
NUMBERS = range(RANDOM + EXTREME)
"""Of batches; those from RANDOM on are extreme: ratios of e^-30 to e^30, in half of them responses of one token."""


class Case:
    """k responses, of lengths int64 [k], laid out both ways: [R] one after the other, and padded, [k, T]."""

    def __init__(self, number: int) -> None:
        random = np.random.default_rng(number)
        extreme = number >= RANDOM
        k = int(random.integers(2, 9))
        self.lengths = torch.from_numpy(random.integers(1, 2 if extreme and number % 2 else 24, size=k))
        self.there = torch.arange(int(self.lengths.max())) < self.lengths[:, None]
        spread = 10.0 if extreme else 0.3
        tokens = int(self.lengths.sum())
        self.behaviour = torch.from_numpy(-random.exponential(1.0, tokens)).float()
        self.log_probs = -(self.behaviour + torch.from_numpy(random.normal(0, spread, tokens)).float()).abs()
        self.advantages = torch.from_numpy(random.normal(0, 1, k)).float().repeat_interleave(self.lengths)
        self.mask = torch.from_numpy(random.random(tokens) < 0.8)
        self.mask[torch.cumsum(self.lengths, 0) - self.lengths] = True  # every response begins with the policy
        self.entropies = torch.from_numpy(random.exponential(1.0, tokens)).float()

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """[R] -> [k, T], 0 where there is nothing."""
        return torch.zeros(self.there.shape, dtype=values.dtype).masked_scatter(self.there, values)

    def sequences(self) -> Iterator[slice]:
        """Where each response lies in [R]."""
        ends = torch.cumsum(self.lengths, 0).tolist()
        return (slice(end - length, end) for end, length in zip(ends, self.lengths.tolist(), strict=True))


Pair = tuple[torch.Tensor, torch.Tensor]


def algorithm(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, **settings)


def aggregated(case: Case, losses: torch.Tensor, aggregation: str, log_probs: torch.Tensor, **options: Any) -> Pair:
    """The loss of the batch, and its gradient in log_probs [R]. options: of the aggregation."""
    aggregate = aggregation_of(algorithm(aggregation=aggregation, options=options))
    weights, divisor = aggregate(case.mask, case.lengths, case.there.shape[1])
    total = (losses if weights is None else losses * weights).sum()
    loss = total / max(1, divisor)
    (gradient,) = torch.autograd.grad(loss, log_probs, retain_graph=True)
    return loss.detach(), gradient
