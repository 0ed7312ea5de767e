"""Intervals, tests and shares against scipy and published figures, on fixed data."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import optimize, stats

from harness.comparison.statistics import student
from harness.comparison.statistics.families import call, holm
from harness.comparison.statistics.interquartile import bootstrap_iqm, iqm
from harness.comparison.statistics.interval import Interval
from harness.comparison.statistics.means import (
    group_difference,
    group_ratio,
    mean_interval,
    paired_difference,
    paired_ratio,
)
from harness.comparison.statistics.shares import performance_profile, probability_of_improvement, share_interval

OURS = {0: 0.886, 1: 0.904, 2: 0.871, 3: 0.893, 4: 0.880}
THEIRS = {0: 0.879, 1: 0.887, 2: 0.876, 3: 0.870, 4: 0.869}
SLEEP = (  # "Student", The probable error of a mean, Biometrika 6 (1908): hours of sleep gained by two drugs
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 30, 101])
def test_the_t_distribution_is_that_of_scipy(freedom: int) -> None:
    for t in (0.0, 0.3, 1.0, 2.776, 12.7, 80.0):
        assert student.two_sided_p(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), abs=1e-14)
    for confidence in (0.5, 0.9, 0.95, 0.999):
        expected = stats.t.ppf((1 + confidence) / 2, freedom)
        assert student.critical(confidence, freedom) == pytest.approx(expected, rel=1e-9)


def test_the_mean_of_seeds_has_the_t_interval() -> None:
    values = list(OURS.values())
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    its = mean_interval(values)
    assert (its.value, its.low, its.high) == pytest.approx((np.mean(values), low, high), rel=1e-12)


def test_one_seed_has_no_interval_and_an_infinity_no_mean() -> None:
    assert mean_interval([3.0]) == Interval(3.0, -math.inf, math.inf)
    assert not mean_interval([3.0]).bounded
    with pytest.raises(ValueError, match="inf"):
        mean_interval([1.0, math.inf])
    with pytest.raises(ValueError, match="no mean"):
        mean_interval([])


def test_a_paired_difference_is_the_paired_t_test() -> None:
    expected = stats.ttest_rel(list(OURS.values()), list(THEIRS.values()))
    bounds = expected.confidence_interval(0.95)
    found = paired_difference(OURS, THEIRS)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.interval.low, found.interval.high) == pytest.approx((bounds.low, bounds.high))
    assert found.paired and found.per_seed[2] == pytest.approx(-0.005)
    assert not found.distinguishable


def test_students_own_example_comes_out_as_published() -> None:
    second, first = (dict(enumerate(drug)) for drug in reversed(SLEEP))
    found = paired_difference(second, first)
    assert found.interval.value == pytest.approx(1.58)
    assert found.p == pytest.approx(0.00283, abs=5e-6)  # t = 4.062 with 9 degrees of freedom
    assert found.distinguishable


def test_only_seeds_that_both_have_are_paired() -> None:
    assert paired_difference({0: 2.0, 1: 3.0, 7: 99.0}, {0: 1.0, 1: 2.5, 8: 0.0}).per_seed == {0: 1.0, 1: 0.5}
    with pytest.raises(ValueError, match="no seed in common"):
        paired_difference({0: 1.0}, {1: 1.0})


def test_a_ratio_is_the_difference_of_logarithms() -> None:
    logs = paired_difference(
        {seed: math.log(value) for seed, value in OURS.items()}, {s: math.log(v) for s, v in THEIRS.items()}
    )
    ratio = paired_ratio(OURS, THEIRS)
    assert ratio.none == 1.0 and ratio.p == pytest.approx(logs.p)
    assert ratio.interval.high == pytest.approx(math.exp(logs.interval.high))
    assert ratio.per_seed[0] == pytest.approx(0.886 / 0.879)
    with pytest.raises(ValueError, match="not positive"):
        paired_ratio({0: 0.0}, {0: 1.0})


def test_groups_without_a_seed_in_common_are_compared_by_welch() -> None:
    one, two = [5.0, 6.0, 7.5, 5.5], [4.0, 9.0, 1.0, 3.0, 2.0, 6.0]
    expected = stats.ttest_ind(one, two, equal_var=False)
    found = group_difference(one, two)
    t = expected.statistic
    assert found.p == pytest.approx(2 * stats.t.sf(t, math.floor(expected.df)))
    assert expected.pvalue < found.p < expected.pvalue * 1.1, "degrees of freedom are rounded down"
    assert not found.paired
    assert group_ratio([2.0, 2.0], [1.0, 1.0]).interval.value == pytest.approx(2.0)
    assert not group_difference([1.0], [2.0, 3.0]).distinguishable


def test_values_that_differ_by_rounding_only_are_equal() -> None:
    nearly = {seed: value * (1 + 1e-14) for seed, value in OURS.items()}
    assert paired_difference(nearly, OURS).interval == Interval(0.0, 0.0, 0.0)
    assert not paired_ratio(nearly, OURS).distinguishable


def test_the_same_difference_in_every_seed_is_one() -> None:
    found = paired_difference({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0})
    assert found.distinguishable and found.interval == Interval(1.0, 1.0, 1.0)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 7, 8, 23])
def test_the_interquartile_mean_is_scipys_trimmed_mean(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count)
    assert iqm(values) == pytest.approx(stats.trim_mean(values, 0.25))


def test_the_bootstrap_of_the_iqm_gives_the_percentiles_of_every_resample() -> None:
    values = [0.1, 0.4, 0.5, 0.9]
    every = sorted(iqm(drawn) for drawn in product(values, repeat=4))
    exact = np.quantile(every, [0.025, 0.975])
    found = bootstrap_iqm([values], draws=40_000)
    assert found.value == pytest.approx(0.45)
    assert (found.low, found.high) == pytest.approx(exact, abs=0.026)  # resamples are this far apart there
    assert found == bootstrap_iqm([values], draws=40_000)


def test_the_bootstrap_keeps_to_its_strata() -> None:
    its = bootstrap_iqm([[1.0] * 5, [3.0] * 5])
    assert (its.value, its.low, its.high) == (2.0, 2.0, 2.0)


def test_the_probability_of_improvement_is_the_mann_whitney_statistic() -> None:
    ours, theirs = [1.0, 3.0, 3.0, 8.0], [2.0, 3.0, 0.0, 5.0, 9.0]
    its = probability_of_improvement(ours, theirs)
    assert its.value == pytest.approx(stats.mannwhitneyu(ours, theirs).statistic / 20)
    opposite = probability_of_improvement(theirs, ours)
    assert (opposite.low, opposite.high) == pytest.approx((1 - its.high, 1 - its.low))
    assert probability_of_improvement([math.inf, math.inf], [math.inf]).value == 0.5


@pytest.mark.parametrize(("ours", "theirs"), [([1, 4, 6, 7, 9], [2, 3, 5, 8, 0]), ([5, 6, 7], [1, 2, 3, 4])])
def test_its_bounds_solve_newcombes_equation(ours: list[float], theirs: list[float]) -> None:
    its, m, n = probability_of_improvement(ours, theirs), len(ours), len(theirs)

    def excess(theta: float) -> float:
        spread = 1 + ((m + n) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (its.value - theta) ** 2 - stats.norm.ppf(0.975) ** 2 * theta * (1 - theta) * spread / (m * n)

    assert its.low == pytest.approx(optimize.brentq(excess, 1e-9, its.value - 1e-9))
    if its.value < 1:
        assert its.high == pytest.approx(optimize.brentq(excess, its.value + 1e-9, 1 - 1e-9))
    else:
        assert its.high == 1.0 and its.low < 0.8, "three runs that beat four are no certainty"


@pytest.mark.parametrize(("hits", "runs"), [(0, 5), (3, 5), (5, 5), (17, 40)])
def test_a_share_of_runs_has_wilsons_interval(hits: int, runs: int) -> None:
    expected = stats.binomtest(hits, runs).proportion_ci(method="wilson")
    its = share_interval(hits, runs)
    assert (its.low, its.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_performance_profile_counts_runs_above_each_score() -> None:
    profile = performance_profile([0.2, 0.5, 0.8, 0.8], [0.0, 0.5, 0.8])
    assert [its.value for its in profile] == [1.0, 0.5, 0.0]
    assert profile[0].low < 0.6 and profile[2].high > 0.4


def test_holms_adjusted_p_values_are_those_of_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0] and holm([]) == []


def test_a_difference_may_be_called_alone_and_not_in_a_family() -> None:
    faint = paired_difference({0: 1.0, 1: 2.0, 2: 3.0, 3: 1.5, 4: 2.5}, {0: 0.5, 1: 1.9, 2: 2.4, 3: 1.2, 4: 2.3})
    nothing = paired_difference(OURS, THEIRS)
    assert 0.01 < faint.p < 0.05 and call([faint])[0].distinguishable
    assert not any(its.distinguishable for its in call([faint, *[nothing] * 6]))
