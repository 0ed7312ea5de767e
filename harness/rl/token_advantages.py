"""Advantages that differ from token to token of a response."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from harness.config import AlgorithmConfig
from harness.config.plugins import keywords, named_by
from harness.config.registries import find
from harness.rl.gae import gae_of
from harness.rl.reward_kl import less_costs


class TokenAdvantages(NamedTuple):
    """Advantages of tokens. made_of: the column with a value per token that is read besides rewards; columns: of
    rewards float64 [groups, n], that column float32 [R], mask bool [R], lengths int64 [groups * n] and what is taken
    off the reward at each token, float32 [R] or None, the columns that are written, float32 [R]."""

    made_of: str
    columns: Callable[..., dict[str, torch.Tensor]]


def token_advantages_of(algorithm: AlgorithmConfig) -> TokenAdvantages | None:
    """The estimate with the options of the settings; None where all tokens of a response have the same advantage.
    Raises ConfigError for options that are off."""
    if algorithm.has_critic:
        estimate = gae_of(algorithm)

        def by_values(*given: torch.Tensor | None) -> dict[str, torch.Tensor]:
            return dict(zip(("advantage", "returns"), estimate(*given), strict=True))

        return TokenAdvantages("values", _of_scored(by_values, lambda scored: [scored.flatten()], "returns"))
    if algorithm.has_token_baseline:
        name, function = algorithm.advantage, find("algorithm.advantage", algorithm.advantage)
        own = keywords(function, named_by(function, algorithm.options), "algorithm.options", name)
        compare = partial(function, **own)

        def of_whole_rewards(
            rewards: torch.Tensor,
            squares: torch.Tensor,
            mask: torch.Tensor,
            lengths: torch.Tensor,
            costs: torch.Tensor | None = None,
        ) -> dict[str, torch.Tensor]:
            left = rewards if costs is None else less_costs(rewards, costs, lengths)
            return {"advantage": compare(left, squares, mask, lengths)}

        return TokenAdvantages("gradient_squares", _of_scored(of_whole_rewards, _groups_of_several))
    return None


def _groups_of_several(scored: torch.Tensor) -> list[torch.Tensor]:
    """The scored samples of each group that has two or more to compare, of bool [groups, n]: bool [groups * n] each."""
    found = []
    for group in range(len(scored)):
        kept = torch.zeros_like(scored)
        kept[group] = scored[group]
        found += [kept.flatten()] if int(kept.sum()) >= 2 else []
    return found


def _of_scored(
    columns: Callable[..., dict[str, torch.Tensor]],
    together: Callable[[torch.Tensor], list[torch.Tensor]],
    *besides: str,
) -> Callable[..., dict[str, torch.Tensor]]:
    """The columns (advantages, and what is made `besides`) of the samples that were scored (not NaN), of those that are
    `together` at once; they are 0 for the others."""

    def of_scored(
        rewards: torch.Tensor,
        column: torch.Tensor,
        mask: torch.Tensor,
        lengths: torch.Tensor,
        costs: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        scored = ~rewards.isnan()
        if scored.all():
            return columns(rewards, column, mask, lengths, costs)
        found = {name: torch.zeros_like(column) for name in ("advantage", *besides)}
        for kept in together(scored):
            at = kept.repeat_interleave(lengths)
            cost = None if costs is None else costs[at]
            part = columns(rewards.flatten()[kept][None], column[at], mask[at], lengths[kept], cost)
            for name, values in part.items():
                found[name][at] = values
        return found

    return of_scored
