"""Advantages of tokens from the values of a critic: generalised advantage estimation, Schulman et al. (arXiv
1506.02438), equation 16.

A response's tokens are its steps; those that an environment wrote are none, and are passed over. Arrays of tokens are
[R], one response after the other, of `lengths` int64 [k]; `mask` is bool [R], False where nothing was sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence

from harness.config import AlgorithmConfig
from harness.config.fields import Part
from harness.config.plugins import keywords, named_by
from harness.rl.batch_advantages import whitened

ByValues = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`gae`, with its options."""


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    costs: torch.Tensor | None = None,
    *,
    gamma: Part = 1.0,
    lam: Part = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, float32 [R]; 0 where mask is False. rewards: float32 [k] or [groups, n]; costs: float32
    [R], taken off the reward at each token. A response has its reward at its last sampled token, and no value after it,
    also where it was cut off:

        delta_t = r_t + gamma V_(t+1) - V_t,    A_t = delta_t + gamma lam A_(t+1),    returns = A + V
    """
    steps = [part[kept].double() for part, kept in _responses(lengths, values, mask)]
    backwards = pad_sequence([part.flip(0) for part in steps], batch_first=True)  # [k, T]: the last step comes first
    taken = torch.zeros_like(backwards)
    if costs is not None:
        of_steps = [part[kept].double().flip(0) for part, kept in _responses(lengths, costs, mask)]
        taken = pad_sequence(of_steps, batch_first=True)
    found = torch.zeros_like(backwards)
    following, ahead = torch.zeros_like(backwards[:, 0]), rewards.flatten().double()
    for t in range(backwards.shape[1]):
        # `ahead`: gamma V_(t+1), which of the last step is the reward
        following = ahead - taken[:, t] - backwards[:, t] + gamma * lam * following
        found[:, t] = following
        ahead = gamma * backwards[:, t]
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[mask] = torch.cat([row[: len(part)].flip(0) for row, part in zip(found, steps, strict=True)]).float()
    returns[mask] = advantages[mask] + values[mask]
    return advantages, returns


def gae_of(algorithm: AlgorithmConfig) -> ByValues:
    """The estimate with the options of the settings. With `algorithm.normalise_std` advantages are whitened over the
    tokens that were sampled, so that rewards have to be those of a whole batch. Raises ConfigError for options that are
    off."""
    own = keywords(gae, named_by(gae, algorithm.options), "algorithm.options", "gae")
    estimate: ByValues = partial(gae, **own)
    if not algorithm.normalise_std:
        return estimate

    def of_batch(
        rewards: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        lengths: torch.Tensor,
        costs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        advantages, returns = estimate(rewards, values, mask, lengths, costs)
        return whitened(advantages, mask).masked_fill(~mask, 0.0), returns

    return of_batch


def _responses(lengths: torch.Tensor, *columns: torch.Tensor) -> zip[tuple[torch.Tensor, ...]]:
    return zip(*(column.split(lengths.tolist()) for column in columns), strict=True)
