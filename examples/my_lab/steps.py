"""Shaping, and what is too far off the policy: algorithm.shaping, algorithm.rejection (docs/plugins.md)."""

import torch


def cautious(rewards: torch.Tensor, *, longest: int, lengths: torch.Tensor, price: float = 0.5) -> torch.Tensor:
    """Half of the reward goes for a response that uses all that there is."""
    return rewards * (1 - price * lengths / longest)


def surprise(log_ratio: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """What the bounds are for, of every token."""
    return log_ratio.abs()
