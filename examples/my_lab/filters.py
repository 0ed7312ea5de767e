"""A filter of your own: algorithm.filter=my_lab.filters:middling algorithm.options.most=0.8 (docs/plugins.md)."""

import torch


def middling(rewards: torch.Tensor, *, truncated: torch.Tensor, most: float = 0.9) -> torch.Tensor:
    """Keep groups that are neither hopeless nor done with, and not all cut off."""
    mean = rewards.mean(dim=1)
    return (mean > 0) & (mean < most) & ~truncated.all(dim=1)
