"""The loss of a batch from losses of tokens, as a weight for each token and one divisor of all.

A batch comes in micro-batches and over ranks, and its size is not known before the last of them. So each micro-batch
back-propagates the sum of weighted losses, and the gradient is divided once: exact for any cut of a batch at sequences.
"""

from __future__ import annotations

import torch

from harness.rl.losses.ratios import at_tokens, sequence_sum


def token_weights(kind: str, mask: torch.Tensor, lengths: torch.Tensor, horizon: int) -> torch.Tensor | None:
    """The weight of each token's loss, float32 [R]; None where all have weight 1. kind: one of
    `harness.config.job.AGGREGATIONS`; mask: bool [R]; lengths: int64 [k].

    token_mean: DAPO (arXiv 2503.14476), section 3.3. sequence_mean_token_mean: GRPO, DeepSeekMath (arXiv 2402.03300),
    equation 3. sequence_mean_token_sum: the policy gradient of a sequence's return; _norm divides it by `horizon`, the
    longest response that there may be, as Dr. GRPO's code does (arXiv 2503.20783). token_sum: no mean at all.
    """
    if kind == "sequence_mean_token_mean":
        return at_tokens(1.0 / sequence_sum(mask.float(), lengths).clamp(min=1.0), lengths)
    if kind == "sequence_mean_token_sum_norm":
        return torch.full(mask.shape, 1.0 / horizon, device=mask.device)
    return None


def divisor(kind: str, mask: torch.Tensor, lengths: torch.Tensor) -> int:
    """The micro-batch's part of the divisor, which is the sum over micro-batches and ranks. Tokens, or sequences that
    have one; 0 for token_sum, which is divided by 1."""
    if kind == "token_sum":
        return 0
    if kind == "token_mean":
        return int(mask.sum())
    return int((sequence_sum(mask.float(), lengths) > 0).sum())
