"""Functions of groups, of which no bit may depend on the groups beside them, and that are not shown samples that could
not be scored, whose reward is NaN."""

from collections.abc import Callable

import torch

OfGroups = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Rewards float64 [groups, n], and lengths int64 [groups, n] where it reads them -> float32 [groups, n]."""


def one_by_one(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same function of rewards, and of what else it is given by name, all [groups, ...], asked for one group at a
    time.

    How many groups come together is the schedule's, and no bit may depend on it: not even `torch.std` is the same
    for one row and for several, as it has an algorithm of its own (`std_var_all_cpu`) for a single result."""

    def alone(rewards: torch.Tensor, lengths: torch.Tensor | None = None, **given: torch.Tensor) -> torch.Tensor:
        columns = given if lengths is None else {**given, "lengths": lengths}
        parts = {name: column.split(1) for name, column in columns.items()}
        return torch.cat(
            [
                function(group, **{name: part[place] for name, part in parts.items()})
                for place, group in enumerate(rewards.split(1))
            ]
        )

    return alone


def of_scored(function: OfGroups, missing: float, *, least: int = 1, first: bool = False) -> OfGroups:
    """The function, given of each group the samples that were scored alone; the others get `missing`. So do groups with
    fewer than `least` of them, and, where all are compared with the `first`, those that lack it."""

    def scored(rewards: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        there = ~rewards.isnan()
        if there.all():
            return function(rewards, lengths)
        found = torch.full_like(rewards, missing)
        for group, kept in enumerate(there):
            if int(kept.sum()) >= least and (kept[0] or not first):
                of_kept = None if lengths is None else lengths[group, kept][None]
                found[group, kept] = function(rewards[group, kept][None], of_kept)[0].to(found.dtype)
        return found

    return scored
