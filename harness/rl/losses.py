"""Policy losses per token, and what each does about tokens that an older policy sampled.

Every loss takes log_probs, behaviour_log_probs, advantages (float32) and mask (bool), all [B, T], and returns float32
[B, T], exactly 0 (as is its gradient) where mask is False, whatever stands there. Micro-batches back-propagate the SUM;
dividing the gradient by the batch's token count once, before clipping and the optimizer step, gives the mean over
tokens without anyone knowing that count in advance (docs/algorithms.md).

ratio = pi(token) / mu(token): the policy in training over the behaviour policy that sampled the token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut off here, so that no ratio overflows float32."""


def no_correction(
    log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """-A log pi: the policy gradient as if the tokens were its own (REINFORCE, Williams 1992); ratio 1 throughout."""
    return -(advantages * log_probs.masked_fill(~mask, 0.0)).masked_fill(~mask, 0.0)


def clip(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """-min(ratio A, clamp(ratio, 1 - clip_low, 1 + clip_high) A): PPO (arXiv 1707.06347), equation 7.

    The old policy of the paper is here the behaviour policy, staleness and all. clip_high > clip_low is DAPO's
    "clip higher" (arXiv 2503.14476).
    """
    ratio = policy_ratio(log_probs, behaviour_log_probs, mask)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages).masked_fill(~mask, 0.0)


def truncated_importance(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    cap: float = 2.0,
) -> torch.Tensor:
    """-min(ratio, cap) A log pi, the weight detached: importance weights truncated from above.

    IMPALA (arXiv 1802.01561), section 4.2; as a remedy for engines that differ from the trainer: "Your efficient RL
    framework secretly brings you off-policy RL training" (Yao et al. 2025). cap = inf is plain importance weighting.
    """
    weight = policy_ratio(log_probs.detach(), behaviour_log_probs, mask).clamp(max=cap)
    return -(weight * advantages * log_probs.masked_fill(~mask, 0.0)).masked_fill(~mask, 0.0)


CORRECTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "none": no_correction,
    "clip": clip,
    "tis": truncated_importance,
}
"""Every off-policy correction by name; its options are the function's keyword arguments."""


def policy_ratio(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """pi / mu per token, float32 [B, T]; 1 where mask is False. Differentiable in both."""
    log_ratio = log_probs.masked_fill(~mask, 0.0) - behaviour_log_probs.masked_fill(~mask, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(pi, other) per token, estimated from tokens that pi sampled: [B, T] x 3 -> float32 [B, T], 0 off the mask.

    exp(d) - d - 1 with d = log other - log pi: unbiased and never negative (Schulman, "Approximating KL divergence",
    2020, estimator k3); GRPO's penalty, DeepSeekMath equation 4.
    """
    difference = other_log_probs.masked_fill(~mask, 0.0) - log_probs.masked_fill(~mask, 0.0)
    difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference
