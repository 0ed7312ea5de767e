"""Changes of rewards before they are compared: `algorithm.shaping` names the steps, one after the other.

Every step takes rewards [groups, n], float64 (the user's own float32), and, by keyword, `lengths` (the sampled tokens
of each response, int64 [groups, n]) and `longest` (the tokens that a response may have, `max_tokens`), where it has
such parameters; it returns rewards [groups, n]. Samples that could not be scored are not among them. The rewards that a
run reports stay those of its task.
"""

import inspect
from typing import Any

import torch

from harness.config import AlgorithmConfig, ConfigError
from harness.config.fields import Count, NotNegative
from harness.config.plugins import is_path, keywords, named_by
from harness.config.registries import find_function
from harness.rl.groups import OfGroups, of_scored, one_by_one

Shaping = OfGroups
"""Rewards float64 [groups, n] and lengths int64 [groups, n] -> rewards."""


def overlong(
    rewards: torch.Tensor,
    *,
    lengths: torch.Tensor,
    longest: int,
    overlong_buffer: Count,
    overlong_factor: NotNegative = 1.0,
) -> torch.Tensor:
    """r - factor (l - (longest - buffer)) / buffer for responses that use the last `buffer` tokens that there are.

    Soft overlong punishment, DAPO (arXiv 2503.14476), equation 13; the factor is verl's. Raises ConfigError where the
    buffer is longer than a response may be.
    """
    if overlong_buffer > longest:
        raise ConfigError(
            f"algorithm.options.overlong_buffer={overlong_buffer} is more than the {longest} tokens that a response "
            f"may have; set it to {longest} or less"
        )
    used = (lengths - (longest - overlong_buffer)).clamp(min=0)
    return rewards - overlong_factor * used / overlong_buffer


def length(rewards: torch.Tensor, *, lengths: torch.Tensor, length_price: NotNegative) -> torch.Tensor:
    """r - price l / (the longest of its group): shorter answers to the same prompt are better ones; as prime-rl's
    linear length penalty on output tokens."""
    return rewards - length_price * lengths / lengths.amax(dim=1, keepdim=True).clamp(min=1)


def scale(rewards: torch.Tensor, *, reward_scale: float = 1.0, reward_bias: float = 0.0) -> torch.Tensor:
    """(r + bias) scale, in AReaL's order. What divides by a deviation afterwards takes it out again."""
    return (rewards + reward_bias) * reward_scale


def clip(rewards: torch.Tensor, *, reward_low: float, reward_high: float) -> torch.Tensor:
    """r within [low, high]: AReaL's, with bounds of their own. Raises ConfigError where low is not below high."""
    if reward_low >= reward_high:
        raise ConfigError(
            f"algorithm.options.reward_low={reward_low} is not below reward_high={reward_high}; exchange them"
        )
    return rewards.clamp(reward_low, reward_high)


GIVEN = ("lengths", "longest")
"""Keyword arguments that a step that has them is given."""


def shaping_of(algorithm: AlgorithmConfig, longest: int) -> Shaping | None:
    """The steps that the settings name, with their options; None where they name nothing. Raises ConfigError for an
    option that a step lacks or cannot use, and for one of the user's that cannot be called as such."""
    steps = [_step(name, algorithm, longest) for name in algorithm.shaping]
    if not steps:
        return None

    def shaped(rewards: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        for step in steps:
            shape = rewards.shape
            rewards = step(rewards, lengths)
            if rewards.shape != shape:
                raise ValueError(f"shaped rewards must be {list(shape)}, not {list(rewards.shape)}")
            if rewards.isnan().any():
                raise ValueError("shaped rewards must be numbers, not NaN: algorithm.shaping names what made them")
        return rewards

    return of_scored(shaped, torch.nan)


def _step(name: str, algorithm: AlgorithmConfig, longest: int) -> Shaping:
    function = find_function("algorithm.shaping", name)
    own = named_by(function, algorithm.options)
    options = keywords(function, own, "algorithm.options", name, given=GIVEN)
    wanted = inspect.signature(function).parameters

    def step(rewards: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        there: dict[str, Any] = {"lengths": lengths, "longest": longest}
        return function(rewards, **{name: value for name, value in there.items() if name in wanted}, **options)

    if is_path(name):
        return one_by_one(lambda rewards, lengths=None: step(rewards.float(), lengths))
    step(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.int64))  # what cannot be used is told before a run starts
    return step
