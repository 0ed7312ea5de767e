"""Policy losses per token, and what each does about tokens that an older policy sampled.

Every loss takes log_probs, behaviour_log_probs, advantages (float32) and mask (bool), all [B, T], and returns float32
[B, T], exactly 0 (as is its gradient) where mask is False, whatever stands there. Micro-batches back-propagate the SUM;
dividing the gradient by the batch's token count once, before clipping and the optimizer step, gives the mean over
tokens without knowing that count in advance (docs/algorithms.md).

ratio = pi(token) / mu(token): the policy in training over the behaviour policy that sampled the token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from harness.config import AlgorithmConfig
from harness.config.plugins import check_called, is_path, keywords, load, named_by

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


def decoupled(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    proximal_log_probs: torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float | None = 5.0,
) -> torch.Tensor:
    """-w min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A), r = pi / prox, w = prox / mu detached: decoupled PPO.

    The weight answers for who sampled the token, the clip for how far one update goes from the proximal policy: Hilton
    et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641), section 3; AReaL (arXiv 2505.24298),
    section 5.2. Tokens with w > cap are left out, as AReaL's code does; None is the papers' formula.

    proximal_log_probs: float32 [B, T], of the policy to stay near. None: pi as it is now, which r cannot leave; then
    this is `masked_importance` between 0 and cap, and the clip idles.
    """
    if proximal_log_probs is None:
        proximal_log_probs = log_probs.detach()
    weight = _within(policy_ratio(proximal_log_probs, behaviour_log_probs, mask), 0.0, cap)
    return weight * clip(log_probs, proximal_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high)


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
    return no_correction(log_probs, behaviour_log_probs, weight * advantages, mask)


def masked_importance(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> torch.Tensor:
    """-ratio A log pi where low <= ratio <= high, else 0; the weight detached: importance sampling, outliers left out.

    IcePop ("Small leak can sink a great ship", Ling team 2025; its mask and bounds); slime and verl call it masked
    importance sampling (MIS). A token that is left out still counts in the batch's tokens, as in IcePop's objective.
    """
    weight = _within(policy_ratio(log_probs.detach(), behaviour_log_probs, mask), low, high)
    return no_correction(log_probs, behaviour_log_probs, weight * advantages, mask)


CORRECTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "none": no_correction,
    "clip": clip,
    "decoupled": decoupled,
    "tis": truncated_importance,
    "mis": masked_importance,
}
"""Every off-policy correction by name; its options are the function's keyword arguments."""


def policy_loss(algorithm: AlgorithmConfig) -> Callable[..., torch.Tensor]:
    """The correction that the settings name, with its options. Where the settings `train_on_old_log_probs`, each call
    wants them as `proximal_log_probs`. Raises ConfigError for one of the user's that cannot be called as such."""
    path = algorithm.correction
    if is_path(path):
        own = load(path, "algorithm.correction")
        check_called(own, 4, "algorithm.correction", path, "loss(log_probs, behaviour_log_probs, advantages, mask)")
        return partial(_own, own, **keywords(own, named_by(own, algorithm.options), "algorithm.options", path))
    bounds = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    options: dict[str, dict[str, Any]] = {
        "clip": bounds,
        "decoupled": bounds | {"cap": algorithm.decoupled_cap},
        "tis": {"cap": algorithm.tis_cap},
        "mis": {"low": algorithm.mis_low, "high": algorithm.mis_high},
    }
    return partial(CORRECTIONS[algorithm.correction], **options.get(algorithm.correction, {}))


def _own(loss: Callable[..., torch.Tensor], *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """A loss of the user's; what it says off the mask does not count."""
    per_token, mask = loss(*tensors, **options), tensors[-1]
    if per_token.shape != mask.shape:
        raise ValueError(f"the loss must be [B, T] = {list(mask.shape)}, not {list(per_token.shape)}")
    return per_token.masked_fill(~mask, 0.0)


def policy_ratio(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """pi / mu per token, float32 [B, T]; 1 where mask is False. Differentiable in both."""
    log_ratio = log_probs.masked_fill(~mask, 0.0) - behaviour_log_probs.masked_fill(~mask, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _within(weight: torch.Tensor, low: float, high: float | None) -> torch.Tensor:
    """Weights outside of [low, high], and NaN, set to 0; high None is no bound."""
    inside = weight >= low if high is None else (weight >= low) & (weight <= high)
    return weight.masked_fill(~inside, 0.0)


def k3(log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(pi, other) per token, estimated from tokens that pi sampled: [B, T] x 3 -> float32 [B, T], 0 off the mask.

    exp(d) - d - 1 with d = log other - log pi: unbiased and never negative (Schulman, "Approximating KL divergence",
    2020, estimator k3); GRPO's penalty, DeepSeekMath equation 4.
    """
    difference = other_log_probs.masked_fill(~mask, 0.0) - log_probs.masked_fill(~mask, 0.0)
    difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference
