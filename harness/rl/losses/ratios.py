"""pi / mu: the policy in training over the behaviour policy that sampled, by token or by sequence."""

from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut off here, so that no ratio overflows float32."""

Level = Literal["token", "sequence", "geometric"]
"""The level of a ratio: each token's own; the product over its sequence's tokens; the geometric mean of those."""


def log_ratio(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log pi - log mu per token, not cut off; 0 where mask is False, whatever stands there."""
    return log_probs.masked_fill(~mask, 0.0) - behaviour_log_probs.masked_fill(~mask, 0.0)


def policy_ratio(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """pi / mu per token, float32; 1 where mask is False. Differentiable in both."""
    return _ratio(log_ratio(log_probs, behaviour_log_probs, mask))


def ratio_at(
    level: Level,
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """The same at a level, at every token of the sequence that it is of: [R], for sequences of `lengths` (int64 [k])
    one after the other. Raises ValueError where a level of sequences is asked for without lengths."""
    per_token = log_ratio(log_probs, behaviour_log_probs, mask)
    if level == "token":
        return _ratio(per_token)
    if lengths is None:
        raise ValueError(f"level={level} needs the lengths of sequences")
    whole = sequence_sum(per_token, lengths) if level == "sequence" else sequence_mean(per_token, mask, lengths)
    return _ratio(at_tokens(whole, lengths))


def sequence_sum(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[R], [k] -> float [k]."""
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean over tokens where mask is True; 0 of a sequence that has none. [R], bool [R], [k] -> float [k]."""
    counted = sequence_sum(mask.to(values.dtype), lengths).clamp(min=1.0)
    return sequence_sum(values.masked_fill(~mask, 0.0), lengths) / counted


def at_tokens(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A sequence's value at each of its tokens: [k] -> [R]."""
    return values.repeat_interleave(lengths)


def within(weight: torch.Tensor, low: float, high: float | None) -> torch.Tensor:
    """Weights outside of [low, high], and NaN, set to 0; high None is no bound."""
    inside = weight >= low if high is None else (weight >= low) & (weight <= high)
    return weight.masked_fill(~inside, 0.0)


def _ratio(of: torch.Tensor) -> torch.Tensor:
    return of.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def log_linear(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, lags: torch.Tensor) -> torch.Tensor:
    """log mu / (lag + 1) + log pi lag / (lag + 1), as a constant to the gradient: the proximal policy, between the one
    that sampled a token and the one in training, by how many of the versions in between were made before the batch.

    log_probs, behaviour_log_probs: float32 [R]; lags: int [R], versions from mu to the batch's first step, so that its
    own steps are one more. Where the lag is 0 it is mu, and then the weight of `decoupled` is 1. A-3PO
    (arXiv 2512.06547), as AReaL's `loglinear` has it.
    """
    share = lags / (lags + 1)
    return behaviour_log_probs + share * (log_probs.detach() - behaviour_log_probs)
