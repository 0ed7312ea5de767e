"""Other bounds than PPO's on how far a token may go: a soft gate, a pull, and divergences."""

from __future__ import annotations

import torch

from harness.config.fields import Positive
from harness.rl.losses.importance import no_correction
from harness.rl.losses.ratios import log_ratio, policy_ratio

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
