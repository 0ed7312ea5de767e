"""How good a response is, from the rewards of its group.

Every function takes rewards [groups, n], float64 (the user's own float32), and, where it has such a parameter, the
sampled tokens of each response as `lengths` (int64 [groups, n]); it returns float32 [groups, n]. A group whose rewards
are all equal gets exactly 0. A sample that could not be scored is in no group that they are given: of n samples, fewer
may be there.

Those behind `own_options` compare all rewards of a batch with each other: `rewards` and `lengths` are of a whole one.
A function of the user's that needs one as well has the attribute `whole_batch = True`. It is given the groups in which
all samples could be scored; with the attribute `takes_nan = True` all groups, where the reward of those that could not
is NaN.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from harness.config import AlgorithmConfig
from harness.config.fields import Weights
from harness.config.plugins import Function, is_path, keywords, named_by, of_batch
from harness.config.registries import find_function
from harness.rl.groups import of_scored, one_by_one

Advantages = Callable[..., torch.Tensor]
"""Rewards float64 [groups, n], and lengths int64 [groups, n] where it `compares_lengths`; by name `extras`, float64
[groups, n, parts], where it has `parts_compared` -> how much better each is than its group's, float32 [groups, n]."""

_EPS = 1e-6


def _of_groups(compare: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Computes in float64: differences of large rewards are small. Raises ValueError where rewards are not [groups, n]
    with n >= 2: a group of one has nothing to compare with."""

    @wraps(compare)
    def checked(rewards: torch.Tensor, **options: Any) -> torch.Tensor:
        if rewards.ndim != 2 or rewards.shape[1] < 2:
            raise ValueError(
                f"rewards must be [groups, n] with n >= 2, not {list(rewards.shape)}; sample more per prompt"
            )
        rewards = rewards.double()
        equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
        found = compare(rewards, **options).masked_fill(
            equal, 0.0
        )  # a mean of equal rewards can miss them by a rounding
        return found.float()

    return checked


@_of_groups
def group_advantages(rewards: torch.Tensor, *, divide_by_std: bool = True, unbiased: bool = True) -> torch.Tensor:
    """A_ij = (r_ij - mean_j r_ij) / (std_j r_ij + 1e-6): GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2.

    unbiased: the standard deviation is that of a sample, over n - 1, as in verl, slime and TRL; else the population's.
    Without the division it is Dr. GRPO (arXiv 2503.20783), which leaves easy and hard groups their natural weight; and
    GPG's (arXiv 2504.02546) but for its factor of a batch.
    """
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if not divide_by_std:
        return advantages
    return advantages / (rewards.std(dim=1, keepdim=True, unbiased=unbiased) + _EPS)


@_of_groups
def dr_grpo(rewards: torch.Tensor) -> torch.Tensor:
    """A_ij = r_ij - mean_j r_ij: Dr. GRPO (arXiv 2503.20783), section 3.2; `group` without its division."""
    return rewards - rewards.mean(dim=1, keepdim=True)


@_of_groups
def rloo(rewards: torch.Tensor) -> torch.Tensor:
    """A_ij = r_ij - mean of the others' rewards: leave one out, Kool et al. 2019; Ahmadian et al. (arXiv 2402.14740),
    section 3.3."""
    n = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * (n / (n - 1))


@_of_groups
def opo(rewards: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """A_ij = r_ij - sum_j l_ij r_ij / sum_j l_ij: the baseline of least variance where gradients of tokens are alike.

    OPO (arXiv 2505.23585), equation 6.
    """
    return rewards - (lengths * rewards).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)


@_of_groups
def best_of_k(rewards: torch.Tensor, *, divide_by_std: bool = True) -> torch.Tensor:
    """The best response gets what it is ahead of the second best, all others 0: for pass@k with k = n.

    "pass@k policy optimisation", Tang et al. (arXiv 2503.19595), section 3; divided by the group's standard deviation
    (over n - 1) as verl's grpo_passk does.
    """
    best, where = rewards.topk(2, dim=1)
    ahead = best[:, :1] - best[:, 1:]
    if divide_by_std:
        ahead = ahead / (rewards.std(dim=1, keepdim=True) + _EPS)
    return torch.zeros_like(rewards).scatter(1, where[:, :1], ahead)


@_of_groups
def max_rl(rewards: torch.Tensor) -> torch.Tensor:
    """A_ij = (r_ij - mean_j r_ij) / mean_j r_ij for rewards that are not negative: hard prompts weigh more.

    "Maximum likelihood reinforcement learning" (arXiv 2602.02710). A group without reward gets 0.
    """
    mean = rewards.mean(dim=1, keepdim=True)
    return ((rewards - mean) / mean.where(mean > 0, 1.0)).masked_fill(mean <= 0, 0.0)


@_of_groups
def remax(rewards: torch.Tensor) -> torch.Tensor:
    """A_ij = r_ij - r_i0, the first response of a group being the greedy one, which is not trained.

    ReMax, Li et al. (arXiv 2310.10505), equation 5.
    """
    return rewards - rewards[:, :1]


def advantages_of(algorithm: AlgorithmConfig) -> Advantages:
    """The function that the settings name, with its options: each group by itself, unless whole batches are compared.
    Samples without a score (NaN) get 0, and so do those that they leave alone in their group, or without its greedy
    one; of a batch, the samples of groups in which one is missing, unless the function takes NaN.

    Raises ConfigError for one of the user's that cannot be called so.
    """
    path = algorithm.advantage
    own = find_function("algorithm.advantage", path)
    wanted = inspect.signature(own).parameters
    settings = {"divide_by_std": algorithm.normalise_std} if "divide_by_std" in wanted and not is_path(path) else {}
    options = keywords(
        own, named_by(own, algorithm.options), "algorithm.options", path, given=("lengths", "extras", *settings)
    )

    def advantages(rewards: torch.Tensor, lengths: torch.Tensor | None = None, **extras: torch.Tensor) -> torch.Tensor:
        given = ({"lengths": lengths} if "lengths" in wanted else {}) | extras
        return own(rewards.float() if is_path(path) else rewards, **given, **settings, **options)

    if not _compares_batches(own):
        return of_scored(one_by_one(advantages), 0.0, least=2, first=algorithm.has_greedy_baseline)

    def of_batch(rewards: torch.Tensor, lengths: torch.Tensor | None = None, **extras: torch.Tensor) -> torch.Tensor:
        scored = ~rewards.isnan()
        if getattr(own, "takes_nan", False):
            return advantages(rewards, lengths, **extras).where(scored, 0.0)
        found, whole = torch.zeros_like(rewards, dtype=torch.float32), scored.all(dim=1)
        if whole.any():
            of_whole = {name: values[whole] for name, values in extras.items()}
            found[whole] = advantages(rewards[whole], None if lengths is None else lengths[whole], **of_whole).float()
        return found

    return of_batch


def compares_lengths(algorithm: AlgorithmConfig) -> bool:
    """Whether what the settings name reads how long responses are."""
    return "lengths" in inspect.signature(find_function("algorithm.advantage", algorithm.advantage)).parameters


def parts_compared(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Extra values of scores that what the settings name reads in the place of rewards, as its `extras`."""
    reads = "extras" in inspect.signature(find_function("algorithm.advantage", algorithm.advantage)).parameters
    return tuple(algorithm.options.get("parts", ())) if reads else ()


def needs_whole_batch(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages are made batch by batch, in order, not group by group: rewards of a batch are compared, or the
    coefficient of the KL in the reward goes from batch to batch."""
    by_batch = algorithm.kl_target is not None or (algorithm.has_critic and algorithm.normalise_std)
    return by_batch or _compares_batches(find_function("algorithm.advantage", algorithm.advantage))


def _compares_batches(compare: Callable[..., Any]) -> bool:
    return bool(getattr(compare, "whole_batch", False))


_EPS_OF_VARIANCE = 1e-8


def _takes_nan(function: Function) -> Function:
    function.takes_nan = True  # type: ignore[attr-defined]
    return function


@of_batch
@_takes_nan
def reinforce_plus_plus(rewards: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """(r - mean) / sqrt(variance + 1e-8), both over all tokens of the batch, each with its response's reward.

    REINFORCE++ (arXiv 2501.03262), with one reward for each response and no discount; the variance is that of a sample,
    as in verl. Groups are not compared: one of equal rewards teaches, unless the whole batch is alike.
    """
    return whitened(rewards.nan_to_num(0.0), lengths * ~rewards.isnan())


@of_batch
@_takes_nan
def reinforce_plus_plus_baseline(rewards: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """The same of rewards less their group's mean: REINFORCE++-baseline (arXiv 2501.03262)."""
    return whitened(_less_mean(rewards), lengths * ~rewards.isnan())


@of_batch
@_takes_nan
def batch_std(rewards: torch.Tensor) -> torch.Tensor:
    """(r_ij - mean_j r_ij) / (std of all rewards of the batch + 1e-6), over N - 1: no group weighs more for being hard.

    Lite PPO, "Tricks or traps?" (arXiv 2508.08221), section 4.1; TRL's scale_rewards=batch.
    """
    left, scored = _less_mean(rewards), rewards[~rewards.isnan()].double()
    return (left / (scored.std() + _EPS) if len(scored) > 1 else left).float()


@of_batch
@_takes_nan
def gpg(rewards: torch.Tensor) -> torch.Tensor:
    """B / (B - M) (r_ij - mean_j r_ij), M the samples of groups whose rewards are all equal: their share of the
    gradient goes to the others.

    GPG (arXiv 2504.02546); its loss is `algorithm.correction=none`. verl counts in place of B - M the samples whose
    reward is not 0.
    """
    left = _less_mean(rewards)
    return (left / (left != 0).any(dim=1).double().mean().clamp(min=1 / len(rewards))).float()


@of_batch
def gdpo(rewards: torch.Tensor, *, extras: torch.Tensor, lengths: torch.Tensor, parts: Weights) -> torch.Tensor:
    """sum_k w_k (r_ijk - mean_j r_ijk) / (std_j r_ijk + 1e-6), whitened over the batch's tokens: each part of a reward
    is compared by itself, so that none is drowned by another.

    GDPO (arXiv 2601.05242), as verl's. parts: weights w_k of extra values of scores, by name; extras: those values,
    float64 [groups, n, parts]. Rewards are not read. Raises ValueError where a score lacks a part.
    """
    if extras.isnan().any():
        raise ValueError(
            f"a score lacks one of algorithm.options.parts={list(parts)}; give all of them with each score"
        )
    compared = [weight * group_advantages(extras[:, :, place]) for place, weight in enumerate(parts.values())]
    return whitened(torch.stack(compared).sum(dim=0), lengths)


def _less_mean(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards less the mean of their group's, float64; exactly 0 where those are all alike, and for NaN."""

    def of_groups(rewards: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
        return (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(equal, 0.0)

    return of_scored(of_groups, 0.0)(rewards.double(), None)


def whitened(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Values less their mean over their deviation, over tokens: a value counts as often as `counts` says, such as its
    response's tokens; once or not at all, where that is a mask. Where those that count are equal, all become 0."""
    counted = values[counts > 0]
    if not len(counted) or counted.amax() == counted.amin():
        return torch.zeros_like(values)
    exact, weights = values.double(), counts.double()
    tokens = weights.sum()
    mean = (weights * exact).sum() / tokens
    variance = (weights * (exact - mean).square()).sum() / (tokens - 1).clamp(min=1)
    return ((exact - mean) * torch.rsqrt(variance + _EPS_OF_VARIANCE)).float()
