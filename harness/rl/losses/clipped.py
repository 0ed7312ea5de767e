"""PPO's clip, and what bounds it further."""

import torch

from harness.config.fields import Above1, NotNegative, Part, Positive
from harness.rl.losses.ratios import Level, at_tokens, log_ratio, policy_ratio, ratio_at, sequence_mean, within


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
    lengths: torch.Tensor | None = None,
    proximal_log_probs: torch.Tensor | None = None,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    low: Part = 0.0,
    cap: Above1 | None = 5.0,
    level: Level = "token",
) -> torch.Tensor:
    """-w min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A), r = pi / prox, w = prox / mu detached: decoupled PPO.

    The weight answers for who sampled the token, the clip for how far one update goes from the proximal policy: Hilton
    et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641), section 3; AReaL (arXiv 2505.24298),
    section 5.2. Tokens with w > cap are left out, as AReaL's code does; None is the papers' formula. So are those with
    w < low, as in IcePop, which verl, TRL and slime put on a recomputed policy. level: of w; TRL's default: `sequence`.

    proximal_log_probs: float32, of the policy to stay near. None: pi as it is now, which r cannot leave; then
    this is `masked_importance` between low and cap, and the clip idles.
    """
    if proximal_log_probs is None:
        proximal_log_probs = log_probs.detach()
    weight = within(ratio_at(level, proximal_log_probs, behaviour_log_probs, mask, lengths), low, cap)
    return weight * clip(log_probs, proximal_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def decoupled_truncated(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    proximal_log_probs: torch.Tensor | None = None,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    cap: Positive = 2.0,
    level: Level = "token",
    most: Above1 | None = None,
) -> torch.Tensor:
    """-min(w, cap) min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A): `decoupled` with weights that are truncated, so
    that no token is left out for who sampled it.

    PPO's clip on a policy that the trainer recomputes, times what corrects for the engine: Yao et al. 2025 ("Your
    efficient RL framework secretly brings you off-policy RL training"); verl's rollout correction in its decoupled
    mode, TRL's `*_truncate`, SkyRL, ROLL, slime. most: where A < 0 the clipped loss is no more than -most A, as
    `dual_clip`; verl has 3. proximal_log_probs: as `decoupled`; None makes this `truncated_importance`.
    """
    if proximal_log_probs is None:
        proximal_log_probs = log_probs.detach()
    weight = ratio_at(level, proximal_log_probs, behaviour_log_probs, mask, lengths).clamp(max=cap)
    near = (log_probs, proximal_log_probs, advantages, mask)
    if most is None:
        return weight * clip(*near, clip_low=clip_low, clip_high=clip_high)
    return weight * dual_clip(*near, clip_low=clip_low, clip_high=clip_high, most=most)


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
