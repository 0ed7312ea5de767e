"""Tokens and sequences that are left out of any loss because the policy is too far from the one that sampled them.

`algorithm.rejection` gives for each measure the bounds [low, high] of what is kept; null is no bound. A measure is
`<level>_<estimator>`. Estimators compare pi, the policy in training, with mu, the behaviour policy: `ratio` is pi / mu;
`k1`, `k2`, `k3` estimate the KL of mu to pi in nats (harness/rl/kl.py: tokens are mu's); `difference` is pi less mu, as
in ROLL. Levels: `token`; `sequence`, the product of ratios, or the sum of estimates; `geometric`, the geometric mean of
ratios, or the mean of estimates; `max`, the largest estimate of the sequence. As verl's rollout correction, whose
seq_sum, seq_mean and seq_max the last three are. What is left out is in no loss term, and in nothing that losses are
divided by.
"""

import inspect
from collections.abc import Callable

import torch

from harness.config import AlgorithmConfig, ConfigError
from harness.config.registries import find_function
from harness.rl.kl import Estimator, k1, k2, k3
from harness.rl.losses.ratios import MAX_LOG_RATIO, at_tokens, log_ratio, sequence_mean, sequence_sum

Measure = Callable[..., torch.Tensor]
"""log pi - log mu float32 [R], 0 off the mask; mask bool [R]; lengths int64 [k], sequences one after the other; by name
behaviour_log_probs float32 [R], where it has such a parameter -> float [R]: what bounds are for, at every token."""
Rejection = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""log_probs, behaviour_log_probs float32 [R], mask bool [R], lengths int64 [k] -> bool [R]: what is left of mask."""


def _ratio(away: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log pi - log mu itself: measures exponentiate it at their level."""
    return other


def _measure(level: str, estimator: Estimator) -> Measure:
    def measure(away: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        away = away.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        values = estimator(torch.zeros_like(away), away, mask)
        if level != "token":
            values = at_tokens(_LEVELS[level](values, mask, lengths), lengths)
        return values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() if estimator is _ratio else values

    return measure


def _largest(values: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.segment_reduce(values.masked_fill(~mask, 0.0), "max", lengths=lengths, initial=0.0)


_LEVELS: dict[str, Measure] = {
    "sequence": lambda values, mask, lengths: sequence_sum(values.masked_fill(~mask, 0.0), lengths),
    "geometric": sequence_mean,
    "max": _largest,
}


def _difference(level: str) -> Measure:
    """pi less mu, of probabilities of tokens (ROLL, roll/utils/train_infer_corrections.py): unlike a ratio it is small
    where both are."""

    def measure(
        away: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, *, behaviour_log_probs: torch.Tensor
    ) -> torch.Tensor:
        values = (behaviour_log_probs.masked_fill(~mask, 0.0).exp() * away.expm1()).masked_fill(~mask, 0.0)
        return values if level == "token" else at_tokens(_LEVELS[level](values, mask, lengths), lengths)

    return measure


_OF_TOKENS = (_ratio, k1, k2, k3)
token_ratio, token_k1, token_k2, token_k3 = (_measure("token", each) for each in _OF_TOKENS)
sequence_ratio, sequence_k1, sequence_k2, sequence_k3 = (_measure("sequence", each) for each in _OF_TOKENS)
geometric_ratio, geometric_k1, geometric_k2, geometric_k3 = (_measure("geometric", each) for each in _OF_TOKENS)
max_k2, max_k3 = (_measure("max", each) for each in (k2, k3))
token_difference, sequence_difference, geometric_difference = map(_difference, ("token", "sequence", "geometric"))


def rejection_of(algorithm: AlgorithmConfig) -> Rejection | None:
    """The mask of what is left by all measures that the settings name; None where they name none. Raises ConfigError
    where bounds leave nothing, and for a measure of the user's that cannot be called as such."""
    measures = [
        (find_function("algorithm.rejection", name), *_bounds(name, bounds))
        for name, bounds in algorithm.rejection.items()
    ]
    wanting = [measure for measure, *_ in measures if "behaviour_log_probs" in inspect.signature(measure).parameters]
    if not measures:
        return None

    @torch.no_grad()
    def left(
        log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        away = log_ratio(log_probs, behaviour_log_probs, mask)
        kept = mask
        for measure, low, high in measures:
            given = {"behaviour_log_probs": behaviour_log_probs} if measure in wanting else {}
            found = measure(away, mask, lengths, **given)
            kept = kept & (found >= low) & (found <= high)  # NaN is not within any bounds
        return kept

    return left


def _bounds(name: str, bounds: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = (-torch.inf if bounds[0] is None else bounds[0]), (torch.inf if bounds[1] is None else bounds[1])
    if low >= high:
        raise ConfigError(f"algorithm.rejection.{name}=[{low},{high}] leaves nothing; give the lower bound first")
    return low, high
