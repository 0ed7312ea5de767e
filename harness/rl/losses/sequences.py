"""Losses whose ratio is a sequence's. Sequences lie one after the other: all tensors are [R], lengths int64 [k]."""

from __future__ import annotations

import torch

from harness.config.fields import NotNegative
from harness.rl.losses.importance import no_correction
from harness.rl.losses.ratios import MAX_LOG_RATIO, at_tokens, log_ratio, ratio_at, sequence_mean


def gspo(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: torch.Tensor,
    low: float = 3e-4,
    high: float = 4e-4,
) -> torch.Tensor:
    """PPO's clip of the geometric mean of a sequence's ratios, each token with its own share of the gradient.

    GSPO (arXiv 2507.18071), equations 7 and 13 (GSPO-token, of the same value and gradient where all tokens of a
    sequence have one advantage), and its bounds of section 5.1. As in the paper with
    `algorithm.aggregation=sequence_mean_token_mean`.
    """
    per_token = log_ratio(log_probs, behaviour_log_probs, mask)
    whole = at_tokens(sequence_mean(per_token.detach(), mask, lengths), lengths)
    ratio = (per_token - per_token.detach() + whole).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages).masked_fill(~mask, 0.0)


def geo_mean(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: torch.Tensor,
    low: float = 0.4,
    high: float = 0.4,
) -> torch.Tensor:
    """-A times the geometric mean of a sequence's ratios, each clipped before as PPO does: the same at all its tokens.

    GMPO (arXiv 2507.20673), equation 4 and its code: log-ratios are bounded by [-low, high]. As in the paper with
    `algorithm.aggregation=sequence_mean_token_mean`.
    """
    advantages = advantages.masked_fill(~mask, 0.0)
    per_token, sign = log_ratio(log_probs, behaviour_log_probs, mask), advantages.sign()
    pessimistic = sign * torch.minimum(sign * per_token, sign * per_token.clamp(-low, high))
    ratio = at_tokens(sequence_mean(pessimistic, mask, lengths), lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return -(ratio * advantages).masked_fill(~mask, 0.0)


def vespo(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: torch.Tensor,
    power_above: NotNegative = 2.0,
    decay_above: NotNegative = 3.0,
    power_below: NotNegative = 3.0,
    decay_below: NotNegative = 2.0,
) -> torch.Tensor:
    """-w^power exp(decay (1 - w)) A log pi, w the product of a sequence's ratios and all of the weight detached: 1 at
    w = 1, and small where w is far from it on either side. `*_above` are of A >= 0, `*_below` of A < 0.

    VESPO (arXiv 2602.10693); its defaults are TRL's.
    """
    w = ratio_at("sequence", log_probs.detach(), behaviour_log_probs, mask, lengths)
    power = torch.where(advantages >= 0, power_above, power_below)
    decay = torch.where(advantages >= 0, decay_above, decay_below)
    weight = (power * w.log() + decay * (1.0 - w)).exp()
    return no_correction(log_probs, behaviour_log_probs, weight * advantages, mask)
