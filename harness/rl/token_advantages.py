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
    rewards float32 [groups, n], that column float32 [R], mask bool [R], lengths int64 [groups * n] and what is taken
    off the reward at each token, float32 [R] or None, the columns that are written, float32 [R]."""

    made_of: str
    columns: Callable[..., dict[str, torch.Tensor]]


def token_advantages_of(algorithm: AlgorithmConfig) -> TokenAdvantages | None:
    """The estimate with the options of the settings; None where all tokens of a response have the same advantage.
    Raises ConfigError for options that are off."""
    if algorithm.has_critic:
        estimate = gae_of(algorithm)
        return TokenAdvantages(
            "values", lambda *given: dict(zip(("advantage", "returns"), estimate(*given), strict=True))
        )
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

        return TokenAdvantages("gradient_squares", of_whole_rewards)
    return None
