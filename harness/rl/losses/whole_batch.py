"""Losses that look at all tokens of a batch together: cut into micro-batches or ranks they would be others."""

import math

import torch

from harness.config.fields import Fraction, NotNegative, Positive
from harness.config.plugins import of_batch
from harness.rl.losses.clipped import clip
from harness.rl.losses.importance import no_correction
from harness.rl.losses.ratios import Level, log_ratio, policy_ratio, ratio_at, sequence_mean, sequence_sum

_LEAST_MEAN = 1e-8
"""Least mean of weights that are divided by it."""


@of_batch
def clip_cov(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> torch.Tensor:
    """`clip`, without a random `share` of the batch's tokens, drawn among those whose covariance of log-probability and
    advantage is between low and high: they are what makes entropy fall.

    Clip-Cov, Cui et al. (arXiv 2505.22617), equations 11 and 12. The draw follows from the number of candidates.
    """
    losses = clip(log_probs, behaviour_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    ratio = policy_ratio(log_probs.detach(), behaviour_log_probs, mask)
    cut_off = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages < ratio * advantages
    covariance = _covariance(log_probs, advantages, mask)
    candidates = ((covariance > low) & (covariance < high) & mask & ~cut_off).nonzero()
    drawn = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(len(candidates)))
    chosen = candidates[drawn[: max(1, int(share * int(mask.sum())))].to(candidates.device)]
    left_out = torch.zeros_like(mask)
    left_out[tuple(chosen.T)] = True
    return losses.masked_fill(left_out, 0.0)


@of_batch
def kl_cov(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    share: float = 2e-4,
    kl_coef: float = 1.0,
) -> torch.Tensor:
    """-ratio A, and |log ratio| times kl_coef at the `share` of the batch's tokens with the largest covariance of
    log-probability and advantage: KL-Cov, Cui et al. (arXiv 2505.22617), equations 13 and 14."""
    ratio = policy_ratio(log_probs, behaviour_log_probs, mask)
    covariance = _covariance(log_probs, advantages, mask).masked_fill(~mask, -torch.inf).flatten()
    tokens = int(mask.sum())
    largest = covariance.topk(min(tokens, max(1, int(share * tokens)))).indices
    penalised = torch.zeros_like(mask).flatten()
    penalised[largest] = True
    penalty = kl_coef * log_ratio(log_probs, behaviour_log_probs, mask).abs()
    return (-ratio * advantages + penalty * penalised.view_as(mask)).masked_fill(~mask, 0.0)


@of_batch
def second_moment(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    most: float = 0.04,
) -> torch.Tensor:
    """`clip`, without the tokens farthest from mu: as many as it takes until the mean of log(ratio)^2 is below `most`.

    M2PO (arXiv 2510.01161), algorithm 1 as AReaL has it, and the paper's bound. One token is always kept.
    """
    squares = log_ratio(log_probs.detach(), behaviour_log_probs, mask).square()[mask]
    ascending, order = squares.sort()
    counts = torch.arange(1, len(squares) + 1, device=squares.device)
    below = (ascending.cumsum(0) / counts < most).nonzero()
    kept_tokens = int(below[-1]) + 1 if len(below) else 1
    kept_of_mask = torch.zeros_like(squares, dtype=torch.bool)
    kept_of_mask[order[:kept_tokens]] = True
    kept = torch.zeros_like(mask)
    kept[mask] = kept_of_mask
    return clip(log_probs, behaviour_log_probs, advantages, kept, clip_low=clip_low, clip_high=clip_high)


@of_batch
def top_entropy(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    entropies: torch.Tensor,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    share: Fraction = 0.2,
) -> torch.Tensor:
    """`clip` of the `share` of the batch's tokens at which the policy was least certain, by its entropies (float32, of
    the shape of log_probs): where a response branches off.

    Wang et al., "Beyond the 80/20 rule" (arXiv 2506.01939), section 4; TRL's top_entropy_quantile. The others still
    count in what losses are divided by, as there.
    """
    kept = mask
    if tokens := int(mask.sum()):
        least = math.ceil((1.0 - share) * (tokens - 1)) + 1
        kept = mask & (entropies >= entropies[mask].kthvalue(least).values)
    return clip(log_probs, behaviour_log_probs, advantages, kept, clip_low=clip_low, clip_high=clip_high)


@of_batch
def normalised_importance(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: torch.Tensor,
    cap: Positive = 2.0,
    level: Level = "token",
) -> torch.Tensor:
    """`tis`, its weights divided by their mean, so that they are 1 in the mean: self-normalised importance sampling.

    Owen, "Monte Carlo theory, methods and examples" (2013), section 9.2; as verl's rollout correction with
    rollout_is_batch_normalize. The mean is over the batch's tokens, or, of a level of sequences, over its sequences.
    """
    weight = ratio_at(level, log_probs.detach(), behaviour_log_probs, mask, lengths).clamp(max=cap)
    if level == "token":
        mean = weight[mask].mean()
    else:
        whole = sequence_mean(weight, mask, lengths)
        mean = whole[sequence_sum(mask.float(), lengths) > 0].mean()
    return no_correction(log_probs, behaviour_log_probs, weight / mean.clamp(min=_LEAST_MEAN) * advantages, mask)


def _covariance(log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Covariance term of each token: (A - mean A) (log pi - mean log pi), means over the batch's tokens."""
    log_pi = log_probs.detach().masked_fill(~mask, 0.0)
    advantages = advantages.masked_fill(~mask, 0.0)
    tokens = mask.sum().clamp(min=1)
    return (advantages - advantages.sum() / tokens) * (log_pi - log_pi.sum() / tokens)
