"""Intervals hold the truth as often as they say, by simulation with known truth; see docs/statistics.md."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from harness.comparison.statistics.differences import corrected, group_difference, paired_difference
from harness.comparison.statistics.estimates import iqm_interval, pair_share_bounds, t_bounds

REPEATS = 20_000


def error(repeats: int, rate: float = 0.95) -> float:
    """Four binomial standard errors."""
    return 4 * math.sqrt(rate * (1 - rate) / repeats)


def coverage(values: np.ndarray, truth: float) -> float:
    _, low, high = t_bounds(values)
    return float(np.mean((low <= truth) & (truth <= high)))


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_t_intervals_of_few_seeds_cover_at_their_nominal_rate(seeds: int) -> None:
    values = np.random.default_rng(seeds).normal(0.9, 0.01, (REPEATS, seeds))
    assert abs(coverage(values, 0.9) - 0.95) < error(REPEATS)


@pytest.mark.parametrize("seeds", [3, 5])
def test_they_lose_little_where_values_are_skewed_or_have_heavy_tails(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    assert coverage(rng.lognormal(0, 0.5, (REPEATS, seeds)), math.exp(0.125)) > 0.90
    assert coverage(rng.standard_t(3, (REPEATS, seeds)), 0.0) > 0.94


def test_a_percentile_bootstrap_of_five_seeds_does_not_cover_which_is_why_it_calls_nothing() -> None:
    rng = np.random.default_rng(0)
    found = [iqm_interval(rng.standard_normal((1, 5)), draws=400) for _ in range(1000)]
    assert np.mean([not its.excludes(0.0) for its in found]) < 0.93


def test_the_same_schedule_with_other_noise_is_called_different_once_in_twenty() -> None:
    rng = np.random.default_rng(3)
    repeats = 3000
    common, noise = rng.standard_normal((repeats, 1, 5)), rng.standard_normal((repeats, 2, 5))
    wrong = sum(
        paired_difference(dict(enumerate(values)), dict(enumerate(baseline))).distinguishable
        for values, baseline in common + 0.3 * noise
    )
    assert abs(wrong / repeats - 0.05) < error(repeats, 0.05)


def test_groups_with_other_seeds_are_called_different_at_most_once_in_twenty() -> None:
    rng = np.random.default_rng(4)
    repeats = 3000
    wrong = sum(
        group_difference(rng.normal(0, 1, 5).tolist(), rng.normal(0, 3, 5).tolist()).distinguishable
        for _ in range(repeats)
    )
    assert wrong / repeats < 0.05 + error(repeats, 0.05)


def test_seven_schedules_against_a_baseline_err_in_one_family_of_twenty() -> None:
    rng = np.random.default_rng(5)
    repeats, wrong = 1000, 0
    for cells in rng.standard_normal((repeats, 8, 5)):
        baseline, *others = (dict(enumerate(cell)) for cell in cells)
        pairs = [paired_difference(cell, baseline) for cell in others]
        wrong += any(its.distinguishable for its in corrected(pairs))
    assert wrong / repeats < 0.05 + error(repeats, 0.05)


@pytest.mark.parametrize("truth", [0.5, 0.8, 0.98])
def test_the_probability_of_improvement_covers_with_five_seeds_each(truth: float) -> None:
    rng = np.random.default_rng(6)
    repeats = 4000
    values = rng.standard_normal((repeats, 5, 1)) + NormalDist().inv_cdf(truth) * math.sqrt(2)
    wins = (values > rng.standard_normal((repeats, 1, 5))).mean(axis=(1, 2))
    low, high = pair_share_bounds(wins, 5, 5)
    rate = float(np.mean((low <= truth) & (truth <= high)))
    assert 0.95 - error(repeats) < rate < 0.98
