"""A filter for tests: in a module that runs can import."""

import torch


def even(rewards: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """Keeps about half of the groups, whatever they are worth: those with an even number of tokens. Of two or more at
    once it would keep the others, which no schedule may show."""
    return lengths.sum(dim=1) % 2 == len(rewards) - 1
