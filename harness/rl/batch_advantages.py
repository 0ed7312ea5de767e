"""Advantages that compare all rewards of a batch with each other.

As those of harness/rl/advantages.py, but that `rewards` and `lengths` [groups, n] have to be a whole batch. A function
of the user's that needs one as well has the attribute `whole_batch = True`.
"""

from __future__ import annotations

import torch

from harness.config.plugins import of_batch

_EPS, _EPS_OF_STD = 1e-8, 1e-6


@of_batch
def reinforce_plus_plus(rewards: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """(r - mean) / sqrt(variance + 1e-8), both over all tokens of the batch, each with its response's reward.

    REINFORCE++ (arXiv 2501.03262), with one reward for each response and no discount; the variance is that of a sample,
    as in verl. Groups are not compared: one of equal rewards teaches, unless the whole batch is alike.
    """
    return whitened(rewards.float(), lengths)


@of_batch
def reinforce_plus_plus_baseline(rewards: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """The same of rewards less their group's mean: REINFORCE++-baseline (arXiv 2501.03262)."""
    return whitened(_less_mean(rewards.float()), lengths)


@of_batch
def batch_std(rewards: torch.Tensor) -> torch.Tensor:
    """(r_ij - mean_j r_ij) / (std of all rewards of the batch + 1e-6), over N - 1: no group weighs more for being hard.

    Lite PPO, "Tricks or traps?" (arXiv 2508.08221), section 4.1; TRL's scale_rewards=batch.
    """
    rewards = rewards.float()
    return _less_mean(rewards) / (rewards.double().std().float() + _EPS_OF_STD)


@of_batch
def gpg(rewards: torch.Tensor) -> torch.Tensor:
    """B / (B - M) (r_ij - mean_j r_ij), M the samples of groups whose rewards are all equal: their share of the
    gradient goes to the others.

    GPG (arXiv 2504.02546); its loss is `algorithm.correction=none`. verl counts in place of B - M the samples whose
    reward is not 0.
    """
    rewards = rewards.float()
    differ = rewards.amax(dim=1) != rewards.amin(dim=1)
    return _less_mean(rewards) / differ.float().mean().clamp(min=1 / len(rewards))


def _less_mean(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards less the mean of their group; exactly 0 where that is all alike."""
    equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(equal, 0.0)


def whitened(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Values less their mean over their deviation, over tokens: a value counts as often as `counts` says, such as its
    response's tokens; once or not at all, where that is a mask. Equal values become 0."""
    if values.amax() == values.amin():
        return torch.zeros_like(values)
    exact, weights = values.double(), counts.double()
    tokens = weights.sum()
    mean = (weights * exact).sum() / tokens
    variance = (weights * (exact - mean).square()).sum() / (tokens - 1).clamp(min=1)
    return ((exact - mean) * torch.rsqrt(variance + _EPS)).float()
