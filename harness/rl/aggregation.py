"""The loss of a batch from losses of tokens, as a weight for each token and one divisor of all.

A batch comes in micro-batches and over ranks, and its size is not known before the last of them. So each micro-batch
back-propagates the sum of weighted losses, and the gradient is divided once, by the sum of all divisors: exact for any
cut of a batch at sequences.

An aggregation takes mask (bool [R]: tokens that count), lengths (int64 [k]: of the sequences that the tokens are of)
and horizon (tokens that a response may have at most). It returns the weight of each token's loss, float32 [R] or None
where all have weight 1, and the micro-batch's part of the divisor. With the option count_empty, means over sequences
count those without a token that counts: so do TRL's, and verl's `geo_mean`.
"""

from collections.abc import Callable
from functools import partial

import torch

from harness.config import AlgorithmConfig
from harness.config.fields import Switch
from harness.config.plugins import keywords, named_by
from harness.config.registries import find_function
from harness.rl.losses.ratios import at_tokens, sequence_sum

Aggregation = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor | None, int]]


def aggregation_of(algorithm: AlgorithmConfig) -> Aggregation:
    """The aggregation that the settings name, with its options. Raises ConfigError for an option that is off, and where
    the user's own cannot be called as one."""
    name, function = algorithm.aggregation, find_function("algorithm.aggregation", algorithm.aggregation)
    return partial(function, **keywords(function, named_by(function, algorithm.options), "algorithm.options", name))


class LossSum:
    """The sums of token losses of a batch's micro-batches, and the divisor of them all."""

    def __init__(self, algorithm: AlgorithmConfig, horizon: int) -> None:
        """horizon: tokens that a response may have. Raises as `aggregation_of`."""
        self._aggregation, self._horizon, self.divisor = aggregation_of(algorithm), horizon, 0

    def __call__(self, losses: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The sum, [], of losses of tokens, float32 [R] in rows of these lengths, int64 [k]; those under the mask, bool
        [R], aggregated as set. Adds to the divisor."""
        weights, divisor = self._aggregation(mask, lengths, self._horizon)
        self.divisor += divisor
        return (losses if weights is None else losses * weights).sum()


def token_mean(mask: torch.Tensor, lengths: torch.Tensor, horizon: int) -> tuple[None, int]:
    """Weight 1, divided by tokens: DAPO (arXiv 2503.14476), section 3.3."""
    return None, int(mask.sum())


def token_sum(mask: torch.Tensor, lengths: torch.Tensor, horizon: int) -> tuple[None, int]:
    """Weight 1, no mean at all: a batch of divisor 0 is divided by 1."""
    return None, 0


def sequence_mean_token_mean(
    mask: torch.Tensor, lengths: torch.Tensor, horizon: int, *, count_empty: Switch = False
) -> tuple[torch.Tensor, int]:
    """Weight 1 over the tokens of its response, divided by responses: GRPO (arXiv 2402.03300), equation 3."""
    shares = 1.0 / sequence_sum(mask.float(), lengths).clamp(min=1.0)
    return at_tokens(shares, lengths), _sequences(mask, lengths, count_empty)


def sequence_mean_token_sum(
    mask: torch.Tensor, lengths: torch.Tensor, horizon: int, *, count_empty: Switch = False
) -> tuple[None, int]:
    """Weight 1, divided by responses: the policy gradient of a sequence's return."""
    return None, _sequences(mask, lengths, count_empty)


def sequence_mean_token_sum_norm(
    mask: torch.Tensor, lengths: torch.Tensor, horizon: int, *, count_empty: Switch = False
) -> tuple[torch.Tensor, int]:
    """Weight 1 over the longest response that there may be, divided by responses: Dr. GRPO (arXiv 2503.20783)."""
    return torch.full(mask.shape, 1.0 / horizon, device=mask.device), _sequences(mask, lengths, count_empty)


def _sequences(mask: torch.Tensor, lengths: torch.Tensor, count_empty: bool) -> int:
    """Sequences that have a token that counts, or all of them."""
    return len(lengths) if count_empty else int((sequence_sum(mask.float(), lengths) > 0).sum())
