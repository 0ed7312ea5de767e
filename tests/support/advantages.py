"""Advantages for tests of runs: in a module that workers can import."""

import torch


def touchy(rewards: torch.Tensor) -> torch.Tensor:
    """What no schedule may show: it depends on how many groups it is given at a time."""
    return (rewards - rewards.mean(1, keepdim=True)) * (1 + 0.1 * len(rewards))


def over_the_batch(rewards: torch.Tensor) -> torch.Tensor:
    """A comparison of a whole batch that knows nothing of samples without a score."""
    return rewards - rewards.mean() + 1


over_the_batch.whole_batch = True  # type: ignore[attr-defined]
