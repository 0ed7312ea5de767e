"""Policy gradients whose weights are constants to the gradient: none, truncated, or with outliers left out; losses
whose ratio is a sequence's; other bounds than PPO's on how far a token may go: a soft gate, a pull, and divergences.

Where there are `lengths`, int64 [k], sequences lie one after the other: all tensors are [R].
"""

import torch

from harness.config.fields import Above1, Below1, NotNegative, Positive
from harness.rl.losses.ratios import (
    MAX_LOG_RATIO,
    Level,
    at_tokens,
    log_ratio,
    policy_ratio,
    ratio_at,
    sequence_mean,
    within,
)


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


_EPS = 1e-8


def sapo(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    temperature_above: float = 1.0,
    temperature_below: float = 1.05,
) -> torch.Tensor:
    """-4 / t sigmoid(t (ratio - 1)) A: a gate that closes softly, with t by the sign of A.

    SAPO (arXiv 2511.20347), equations 5 and 6, and its temperatures. As in the paper with
    `algorithm.aggregation=sequence_mean_token_mean`.
    """
    ratio = policy_ratio(log_probs, behaviour_log_probs, mask)
    t = torch.where(advantages > 0, temperature_above, temperature_below)
    return -(4 / t * torch.sigmoid(t * (ratio - 1)) * advantages).masked_fill(~mask, 0.0)


def dro(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    penalty: Positive = 1.0,
) -> torch.Tensor:
    """-A log pi + penalty / 2 (log pi - log mu)^2: no ratio at all, and what moves away from mu is pulled back.

    DRO, direct reward optimisation (arXiv 2405.19107), section 3, with the behaviour policy in the place of its
    reference; penalty is its tau.
    """
    away = log_ratio(log_probs, behaviour_log_probs, mask)
    pull = 0.5 * penalty * away.square()
    return no_correction(log_probs, behaviour_log_probs, advantages, mask) + pull


def dppo_tv(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
) -> torch.Tensor:
    """-min(ratio, cap) A log pi where the token's probability has moved by no more than `high` towards A > 0, or by no
    more than `low` towards A < 0; else 0. The weight is detached.

    DPPO with the total variation of a binary distribution (arXiv 2602.04879), sections 4 and 5.4.
    """
    probability, before = (each.masked_fill(~mask, 0.0).exp() for each in (log_probs.detach(), behaviour_log_probs))
    kept = torch.where(advantages > 0, probability - before <= high, probability - before >= -low)
    return _bounded(log_probs, behaviour_log_probs, advantages, mask, kept, cap)


def dppo_kl(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
) -> torch.Tensor:
    """The same with KL(mu, pi) of "this token or another" as the distance; a token that went the other way is kept."""
    log_pi, log_mu = (each.masked_fill(~mask, 0.0) for each in (log_probs.detach(), behaviour_log_probs))
    probability, before = log_pi.exp(), log_mu.exp()
    others = ((1 - before + _EPS) / (1 - probability + _EPS)).log()
    divergence = before * (log_mu - log_pi) + (1 - before) * others
    up = (divergence <= high) | (probability <= before)
    down = (divergence <= low) | (probability >= before)
    return _bounded(log_probs, behaviour_log_probs, advantages, mask, torch.where(advantages > 0, up, down), cap)


def _bounded(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    kept: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    weight = policy_ratio(log_probs.detach(), behaviour_log_probs, mask).clamp(max=cap) * kept
    return no_correction(log_probs, behaviour_log_probs, weight * advantages, mask)
