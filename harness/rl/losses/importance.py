"""Policy gradients whose weights are constants to the gradient: none, truncated, or with outliers left out."""

from __future__ import annotations

import torch

from harness.config.fields import Above1, Below1, Positive
from harness.rl.losses.ratios import Level, policy_ratio, ratio_at, within


def no_correction(
    log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """-A log pi: the policy gradient as if the tokens were its own (REINFORCE, Williams 1992); ratio 1 throughout.

    With advantages that are no more than rewards less their group's mean it is GPG (arXiv 2504.02546), equation 5.
    """
    return -(advantages * log_probs.masked_fill(~mask, 0.0)).masked_fill(~mask, 0.0)


def truncated_importance(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    cap: Positive = 2.0,
    level: Level = "token",
) -> torch.Tensor:
    """-min(ratio, cap) A log pi, the weight detached: importance weights truncated from above.

    IMPALA (arXiv 1802.01561), section 4.2; as a remedy for engines that differ from the trainer: "Your efficient RL
    framework secretly brings you off-policy RL training" (Yao et al. 2025). cap = inf is plain importance weighting.
    level: of the ratio; that of sequences is unbiased, and its variance grows with their length.
    """
    weight = ratio_at(level, log_probs.detach(), behaviour_log_probs, mask, lengths).clamp(max=cap)
    return no_correction(log_probs, behaviour_log_probs, weight * advantages, mask)


def masked_importance(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    low: Below1 = 0.5,
    high: Above1 = 5.0,
    level: Level = "token",
) -> torch.Tensor:
    """-ratio A log pi where low <= ratio <= high, else 0; the weight detached: importance sampling, outliers left out.

    IcePop ("Small leak can sink a great ship", Ling team 2025; its mask and bounds); slime and verl call it masked
    importance sampling (MIS). A token that is left out still counts in the batch's tokens, as in IcePop's objective.
    level: of the ratio; where it is a sequence's, the sequence is left out whole.
    """
    weight = within(ratio_at(level, log_probs.detach(), behaviour_log_probs, mask, lengths), low, high)
    return no_correction(log_probs, behaviour_log_probs, weight * advantages, mask)


def tapered(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    cap: Positive = 1.0,
    level: Level = "sequence",
) -> torch.Tensor:
    """-A log pi where A > 0, else -min(ratio, cap) A log pi, the weight detached: what was good is imitated, what was
    bad loses its gradient as it becomes unlikely.

    TOPR, tapered off-policy REINFORCE (arXiv 2503.14286), equation 8, of whole responses; ROLL's ratios are of tokens.
    The paper goes by the sign of the reward, here it is that of the advantage.
    """
    weight = ratio_at(level, log_probs.detach(), behaviour_log_probs, mask, lengths).clamp(max=cap)
    weight = weight.masked_fill(advantages > 0, 1.0)
    return no_correction(log_probs, behaviour_log_probs, weight * advantages, mask)


def cispo(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float = 1.0,
    high: float = 0.2,
) -> torch.Tensor:
    """-clamp(ratio, 1 - low, 1 + high) A log pi, the weight detached: no token loses its gradient.

    CISPO, MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, which sets no lower bound: low = 1.
    """
    weight = policy_ratio(log_probs.detach(), behaviour_log_probs, mask).clamp(1 - low, 1 + high)
    return no_correction(log_probs, behaviour_log_probs, weight * advantages, mask)
