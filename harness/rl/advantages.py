"""How good a response is, from the rewards of its group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from harness.config import AlgorithmConfig
from harness.config.plugins import check_called, is_path, keywords, load, named_by

Advantages = Callable[[torch.Tensor], torch.Tensor]
"""Rewards float32 [groups, n] -> how much better each is than its group's, float32 [groups, n]."""


def group_advantages(rewards: torch.Tensor, *, divide_by_std: bool = True, eps: float = 1e-6) -> torch.Tensor:
    """Group-relative advantages: rewards float32 [groups, n] -> float32 [groups, n].

    A_ij = (r_ij - mean_j r_ij) / (std_j r_ij + eps), with the population's standard deviation: GRPO, DeepSeekMath
    (arXiv 2402.03300), section 4.1.2. Without the division it is Dr. GRPO (arXiv 2503.20783), which
    leaves easy and hard groups their natural weight. A group whose rewards are all equal gets exactly 0.
    Raises ValueError where rewards are not [groups, n] with n >= 2: a group of one has nothing to compare with.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [groups, n] with n >= 2, not {list(rewards.shape)}; sample more per prompt")
    rewards = rewards.float()
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if divide_by_std:
        advantages = advantages / (rewards.std(dim=1, keepdim=True, unbiased=False) + eps)
    equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return advantages.masked_fill(equal, 0.0)  # the mean of equal rewards can miss them by a rounding


ADVANTAGES: dict[str, Callable[..., torch.Tensor]] = {"group": group_advantages}
"""Every way to compare the rewards of a group, by name."""


def advantages_of(algorithm: AlgorithmConfig) -> Advantages:
    """What the settings name, with its options. Raises ConfigError for one of the user's that cannot be called so."""
    path = algorithm.advantage
    if not is_path(path):
        return partial(ADVANTAGES[path], divide_by_std=algorithm.normalise_std)
    own = load(path, "algorithm.advantage")
    check_called(own, 1, "algorithm.advantage", path, "advantages(rewards)")
    return partial(own, **keywords(own, named_by(own, algorithm.options), "algorithm.options", path))
