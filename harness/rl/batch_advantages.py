"""Advantages that compare all rewards of a batch with each other.

As those of harness/rl/advantages.py, but that `rewards` and `lengths` [groups, n] have to be a whole batch. A function
of the user's that needs one as well has the attribute `whole_batch = True`. It is given the groups in which all samples
could be scored; with the attribute `takes_nan = True` all groups, where the reward of those that could not is NaN.
"""

from __future__ import annotations

import torch

from harness.config.fields import Weights
from harness.config.plugins import Function, of_batch
from harness.rl.advantages import group_advantages
from harness.rl.groups import of_scored

_EPS, _EPS_OF_STD = 1e-8, 1e-6


def _takes_nan(function: Function) -> Function:
    function.takes_nan = True  # type: ignore[attr-defined]
    return function


@of_batch
@_takes_nan
def reinforce_plus_plus(rewards: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """(r - mean) / sqrt(variance + 1e-8), both over all tokens of the batch, each with its response's reward.

    REINFORCE++ (arXiv 2501.03262), with one reward for each response and no discount; the variance is that of a sample,
    as in verl. Groups are not compared: one of equal rewards teaches, unless the whole batch is alike.
    """
    return whitened(rewards.nan_to_num(0.0), lengths * ~rewards.isnan())


@of_batch
@_takes_nan
def reinforce_plus_plus_baseline(rewards: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """The same of rewards less their group's mean: REINFORCE++-baseline (arXiv 2501.03262)."""
    return whitened(_less_mean(rewards), lengths * ~rewards.isnan())


@of_batch
@_takes_nan
def batch_std(rewards: torch.Tensor) -> torch.Tensor:
    """(r_ij - mean_j r_ij) / (std of all rewards of the batch + 1e-6), over N - 1: no group weighs more for being hard.

    Lite PPO, "Tricks or traps?" (arXiv 2508.08221), section 4.1; TRL's scale_rewards=batch.
    """
    left, scored = _less_mean(rewards), rewards[~rewards.isnan()].double()
    return (left / (scored.std() + _EPS_OF_STD) if len(scored) > 1 else left).float()


@of_batch
@_takes_nan
def gpg(rewards: torch.Tensor) -> torch.Tensor:
    """B / (B - M) (r_ij - mean_j r_ij), M the samples of groups whose rewards are all equal: their share of the
    gradient goes to the others.

    GPG (arXiv 2504.02546); its loss is `algorithm.correction=none`. verl counts in place of B - M the samples whose
    reward is not 0.
    """
    left = _less_mean(rewards)
    return (left / (left != 0).any(dim=1).double().mean().clamp(min=1 / len(rewards))).float()


@of_batch
def gdpo(rewards: torch.Tensor, *, extras: torch.Tensor, lengths: torch.Tensor, parts: Weights) -> torch.Tensor:
    """sum_k w_k (r_ijk - mean_j r_ijk) / (std_j r_ijk + 1e-6), whitened over the batch's tokens: each part of a reward
    is compared by itself, so that none is drowned by another.

    GDPO (arXiv 2601.05242), as verl's. parts: weights w_k of extra values of scores, by name; extras: those values,
    float64 [groups, n, parts]. Rewards are not read. Raises ValueError where a score lacks a part.
    """
    if extras.isnan().any():
        raise ValueError(
            f"a score lacks one of algorithm.options.parts={list(parts)}; give all of them with each score"
        )
    compared = [weight * group_advantages(extras[:, :, place]) for place, weight in enumerate(parts.values())]
    return whitened(torch.stack(compared).sum(dim=0), lengths)


def _less_mean(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards less the mean of their group's, float64; exactly 0 where those are all alike, and for NaN."""

    def of_groups(rewards: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
        return (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(equal, 0.0)

    return of_scored(of_groups, 0.0)(rewards.double(), None)


def whitened(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Values less their mean over their deviation, over tokens: a value counts as often as `counts` says, such as its
    response's tokens; once or not at all, where that is a mask. Where those that count are equal, all become 0."""
    counted = values[counts > 0]
    if not len(counted) or counted.amax() == counted.amin():
        return torch.zeros_like(values)
    exact, weights = values.double(), counts.double()
    tokens = weights.sum()
    mean = (weights * exact).sum() / tokens
    variance = (weights * (exact - mean).square()).sum() / (tokens - 1).clamp(min=1)
    return ((exact - mean) * torch.rsqrt(variance + _EPS)).float()
