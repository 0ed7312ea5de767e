"""How good a response is, from the rewards of its group."""

from __future__ import annotations

import torch


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
