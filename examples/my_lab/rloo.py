"""Advantages of your own: algorithm.advantage=my_lab.rloo:rloo (docs/plugins.md)."""

import torch


def rloo(rewards: torch.Tensor) -> torch.Tensor:
    """Each reward less the mean of the others' (RLOO, arXiv 2402.14740)."""
    n = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * n / (n - 1)


def over_the_batch(rewards: torch.Tensor, *, lengths: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    """Less the mean over all tokens of the batch: `whole_batch` says that it is of no use to part of one."""
    return weight * (rewards - (rewards * lengths).sum() / lengths.sum())


over_the_batch.whole_batch = True
