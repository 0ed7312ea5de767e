"""PPO's clip, and what bounds it further."""

from __future__ import annotations

import torch

from harness.config.fields import Above1, NotNegative
from harness.rl.losses.ratios import at_tokens, log_ratio, policy_ratio, sequence_mean, within


def clip(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
) -> torch.Tensor:
    """-min(ratio A, clamp(ratio, 1 - clip_low, 1 + clip_high) A): PPO (arXiv 1707.06347), equation 7.

    The old policy of the paper is here the behaviour policy, staleness and all. clip_high > clip_low is DAPO's
    "clip higher" (arXiv 2503.14476).
    """
    ratio = policy_ratio(log_probs, behaviour_log_probs, mask)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages).masked_fill(~mask, 0.0)


def dual_clip(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    most: float = 3.0,
) -> torch.Tensor:
    """`clip`, and where A < 0 no more than -most A: one token with a large ratio cannot carry the batch's gradient.

    Dual-clip PPO, Ye et al. (arXiv 1912.09729), section 3.3; most, above 1, is their c.
    """
    losses = clip(log_probs, behaviour_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    return torch.where(advantages < 0, torch.minimum(losses, -most * advantages), losses).masked_fill(~mask, 0.0)


def decoupled(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    proximal_log_probs: torch.Tensor | None = None,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    cap: Above1 | None = 5.0,
) -> torch.Tensor:
    """-w min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A), r = pi / prox, w = prox / mu detached: decoupled PPO.

    The weight answers for who sampled the token, the clip for how far one update goes from the proximal policy: Hilton
    et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641), section 3; AReaL (arXiv 2505.24298),
    section 5.2. Tokens with w > cap are left out, as AReaL's code does; None is the papers' formula.

    proximal_log_probs: float32, of the policy to stay near. None: pi as it is now, which r cannot leave; then
    this is `masked_importance` between 0 and cap, and the clip idles.
    """
    if proximal_log_probs is None:
        proximal_log_probs = log_probs.detach()
    weight = within(policy_ratio(proximal_log_probs, behaviour_log_probs, mask), 0.0, cap)
    return weight * clip(log_probs, proximal_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def off_policy_sequence_mask(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: torch.Tensor,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    most_kl: float = 1e-4,
) -> torch.Tensor:
    """`clip`, without the sequences with A < 0 that are far from the policy: mean(log mu - log pi) > most_kl.

    DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, "off-policy sequence masking"; slime's OPSM and default.
    """
    away = at_tokens(sequence_mean(-log_ratio(log_probs.detach(), behaviour_log_probs, mask), mask, lengths), lengths)
    losses = clip(log_probs, behaviour_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    return losses.masked_fill((advantages < 0) & (away > most_kl), 0.0)
