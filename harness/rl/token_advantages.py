"""Advantages that differ from token to token of a response: from the values of a critic by generalised advantage
estimation (Schulman et al., arXiv 1506.02438, equation 16), or from a baseline for each token of a group.

A response's tokens are its steps; those that an environment wrote are none, and are passed over. Arrays of tokens are
[R], one response after the other, of `lengths` int64 [k]; `mask` is bool [R], False where nothing was sampled.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from harness.config import AlgorithmConfig
from harness.config.fields import Part, Switch
from harness.config.plugins import keywords, named_by
from harness.config.registries import find
from harness.rl.advantages import whitened
from harness.rl.kl import less_costs


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


def _responses(lengths: torch.Tensor, *columns: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(column.split(lengths.tolist()) for column in columns), strict=True)


_EPS = 1e-8


def optimal_token_baseline(
    rewards: torch.Tensor,
    gradient_squares: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    zero_tail: Switch = True,
) -> torch.Tensor:
    """Advantages, float32 [R]; 0 where mask is False. For rewards [groups, n] and, of every token, the square w of its
    log-probability's gradient by the logits (harness/rl/log_probs.py):

        W_jt = sum of w_js over s <= t,    B_t = sum_j r_j W_jt / (sum_j W_jt + 1e-8),    A_jt = r_j - B_t

    j are the responses of the group that have a t-th token. zero_tail: tokens that the longest response alone has are
    given no baseline, which would be their own reward. Where rewards are all equal, all others get exactly 0. Each
    group is computed by itself, so that no bit depends on how many come together.

    Li et al., "The optimal token baseline" (ICML 2026, PMLR 306), as verl's `tir_optimal_token_baseline` has it without
    weights of importance; without tokens of an environment that is its `optimal_token_baseline`.
    """
    columns = (column.split(lengths.tolist()) for column in (gradient_squares, mask))
    kept = [part[own].double() for part, own in zip(*columns, strict=True)]
    n, found = rewards.shape[1], list[torch.Tensor]()
    for group, own in enumerate(rewards.double()):
        found += _of_group(own, kept[group * n : (group + 1) * n], zero_tail)
    advantages = torch.zeros_like(gradient_squares)
    advantages[mask] = torch.cat(found).float()
    return advantages


def _of_group(rewards: torch.Tensor, squares: Sequence[torch.Tensor], zero_tail: bool) -> list[torch.Tensor]:
    """rewards float64 [n]; squares: float64 of the tokens of each response -> its advantages."""
    paths = pad_sequence([part.cumsum(0) for part in squares], batch_first=True)  # [n, T]: 0 after a response's end
    baseline = (rewards[:, None] * paths).sum(0) / (paths.sum(0) + _EPS)
    if rewards.amax() == rewards.amin():
        baseline.fill_(rewards[0])
    second = sorted(map(len, squares))[-2]
    if zero_tail or second == 0:  # one response alone has nothing to compare with
        baseline[second:] = 0.0
    return [reward - baseline[: len(part)] for reward, part in zip(rewards, squares, strict=True)]
