"""The loss of a batch from losses of tokens, as a weight for each token and one divisor of all.

A batch comes in micro-batches and over ranks, and its size is not known before the last of them. So each micro-batch
back-propagates the sum of weighted losses, and the gradient is divided once, by the sum of all divisors: exact for any
cut of a batch at sequences.

An aggregation takes mask (bool [R]: tokens that count), lengths (int64 [k]: of the sequences that the tokens are of)
and horizon (tokens that a response may have at most). It returns the weight of each token's loss, float32 [R] or None
where all have weight 1, and the micro-batch's part of the divisor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.config.registries import find_function
from harness.rl.losses.ratios import at_tokens, sequence_sum

Aggregation = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor | None, int]]


def aggregation_of(name: str) -> Aggregation:
    """The aggregation of this name, or the user's own by import path. Raises ConfigError where it cannot be called as
    one."""
    return find_function("algorithm.aggregation", name, 3, "aggregation(mask, lengths, horizon)")


def token_mean(mask: torch.Tensor, lengths: torch.Tensor, horizon: int) -> tuple[None, int]:
    """DAPO (arXiv 2503.14476), section 3.3."""
    return None, int(mask.sum())


def token_sum(mask: torch.Tensor, lengths: torch.Tensor, horizon: int) -> tuple[None, int]:
    """No mean at all: a batch of divisor 0 is divided by 1."""
    return None, 0


def sequence_mean_token_mean(mask: torch.Tensor, lengths: torch.Tensor, horizon: int) -> tuple[torch.Tensor, int]:
    """GRPO, DeepSeekMath (arXiv 2402.03300), equation 3."""
    shares = 1.0 / sequence_sum(mask.float(), lengths).clamp(min=1.0)
    return at_tokens(shares, lengths), _sequences(mask, lengths)


def sequence_mean_token_sum(mask: torch.Tensor, lengths: torch.Tensor, horizon: int) -> tuple[None, int]:
    """The policy gradient of a sequence's return."""
    return None, _sequences(mask, lengths)


def sequence_mean_token_sum_norm(mask: torch.Tensor, lengths: torch.Tensor, horizon: int) -> tuple[torch.Tensor, int]:
    """The same over the horizon, as Dr. GRPO's code has it (arXiv 2503.20783)."""
    return torch.full(mask.shape, 1.0 / horizon, device=mask.device), _sequences(mask, lengths)


def _sequences(mask: torch.Tensor, lengths: torch.Tensor) -> int:
    """Sequences that have a token that counts."""
    return int((sequence_sum(mask.float(), lengths) > 0).sum())
