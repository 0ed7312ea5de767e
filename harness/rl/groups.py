"""Functions of groups, of which no bit may depend on the groups beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch

OfGroups = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Rewards float32 [groups, n], and lengths int64 [groups, n] where it reads them -> float32 [groups, n]."""


def one_by_one(function: OfGroups) -> OfGroups:
    """How many groups come together is the schedule's, and no bit may depend on it: not even `torch.std` is the same
    for one row and for several, as it has an algorithm of its own (`std_var_all_cpu`) for a single result."""

    def alone(rewards: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        if lengths is None:
            return torch.cat([function(group, None) for group in rewards.split(1)])
        return torch.cat([function(*group) for group in zip(rewards.split(1), lengths.split(1), strict=True)])

    return alone
