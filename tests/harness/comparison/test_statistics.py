"""Intervals, differences and shares: on fixed data, and how often they hold a known truth. Along one run: running
means, thresholds, rates, drift."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from harness.comparison.statistics import (
    OUTLIER_Z,
    Interval,
    corrected,
    crossing,
    drift,
    equivalence_p,
    group_difference,
    group_ratio,
    has_steady_part,
    holm,
    iqm_interval,
    mean_interval,
    outliers,
    pair_share_bounds,
    paired_difference,
    paired_ratio,
    performance_profile,
    probability_of_improvement,
    running_mean,
    steady_rate,
    t_bounds,
)

VALUES = {0: 0.886, 1: 0.904, 2: 0.871, 3: 0.893, 4: 0.880}
BASELINE = {0: 0.879, 1: 0.887, 2: 0.876, 3: 0.870, 4: 0.869}
SLEEP = (  # "Student", The probable error of a mean, Biometrika 6 (1908): hvalues of sleep gained by two drugs
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)


def test_the_mean_of_seeds_has_the_t_interval() -> None:
    values = list(VALUES.values())
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    interval = mean_interval(values)
    assert (interval.value, interval.low, interval.high) == pytest.approx((np.mean(values), low, high), rel=1e-12)


def test_one_seed_has_no_interval_and_an_infinity_no_mean() -> None:
    assert mean_interval([3.0]) == Interval(3.0, -math.inf, math.inf)
    assert not mean_interval([3.0]).bounded
    with pytest.raises(ValueError, match="inf"):
        mean_interval([1.0, math.inf])
    with pytest.raises(ValueError, match="no mean"):
        mean_interval([])


def test_a_paired_difference_is_the_paired_t_test() -> None:
    expected = stats.ttest_rel(list(VALUES.values()), list(BASELINE.values()))
    bounds = expected.confidence_interval(0.95)
    found = paired_difference(VALUES, BASELINE)
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
        {seed: math.log(value) for seed, value in VALUES.items()}, {s: math.log(v) for s, v in BASELINE.items()}
    )
    ratio = paired_ratio(VALUES, BASELINE)
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
    nearly = {seed: value * (1 + 1e-14) for seed, value in VALUES.items()}
    assert paired_difference(nearly, VALUES).interval == Interval(0.0, 0.0, 0.0)
    assert not paired_ratio(nearly, VALUES).distinguishable
    assert group_difference([1.0, 1.0], [1.0 + 1e-12] * 2).interval == Interval(0.0, 0.0, 0.0)


def test_a_group_without_any_scatter_has_an_interval_with_the_other_groups_degrees_of_freedom() -> None:
    """Satterthwaite's come out a hair below 3 here, and of two seeds below 1."""
    values = [0.992, 0.065, 0.198, 0.594]
    _, low, high = t_bounds(np.array(values))
    found = group_difference(values, [0.0, 0.0]).interval
    assert (found.low, found.high) == pytest.approx((low, high))


def test_the_same_difference_in_every_seed_is_one_from_three_seeds_on() -> None:
    """Of two, counts differ by the same by chance."""
    values, baseline = {0: 0.59375, 1: 0.65625, 2: 0.71875}, {0: 0.5, 1: 0.5625, 2: 0.625}
    found = paired_difference(values, baseline)
    assert found.distinguishable and found.interval == Interval(0.09375, 0.09375, 0.09375)
    two = paired_difference({0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.6})  # the same but for rounding
    assert not two.distinguishable and two.p == 1.0 and not two.interval.bounded
    assert paired_difference({0: 0.6, 1: 0.7}, {0: 0.6, 1: 0.7}).interval == Interval(0.0, 0.0, 0.0)


def test_the_bootstrap_keeps_to_its_strata() -> None:
    interval = iqm_interval([[1.0] * 5, [3.0] * 5])
    assert (interval.value, interval.low, interval.high) == (2.0, 2.0, 2.0)


def test_the_probability_of_improvement_is_the_mann_whitney_statistic() -> None:
    values, baseline = [1.0, 3.0, 3.0, 8.0], [2.0, 3.0, 0.0, 5.0, 9.0]
    interval = probability_of_improvement(values, baseline)
    assert interval.value == pytest.approx(stats.mannwhitneyu(values, baseline).statistic / 20)
    opposite = probability_of_improvement(baseline, values)
    assert (opposite.low, opposite.high) == pytest.approx((1 - interval.high, 1 - interval.low))
    assert probability_of_improvement([math.inf, math.inf], [math.inf]).value == 0.5


@pytest.mark.parametrize(("values", "baseline"), [([1, 4, 6, 7, 9], [2, 3, 5, 8, 0]), ([5, 6, 7], [1, 2, 3, 4])])
def test_its_bounds_solve_newcombes_equation(values: list[float], baseline: list[float]) -> None:
    interval, m, n = probability_of_improvement(values, baseline), len(values), len(baseline)

    def excess(theta: float) -> float:
        spread = 1 + ((m + n) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (interval.value - theta) ** 2 - stats.norm.ppf(0.975) ** 2 * theta * (1 - theta) * spread / (m * n)

    assert interval.low == pytest.approx(optimize.brentq(excess, 1e-9, interval.value - 1e-9))
    if interval.value < 1:
        assert interval.high == pytest.approx(optimize.brentq(excess, interval.value + 1e-9, 1 - 1e-9))
    else:
        assert interval.high == 1.0 and interval.low < 0.8, "three runs that beat four are no certainty"


def test_a_performance_profile_counts_runs_above_each_score() -> None:
    shares, low, high = performance_profile([0.2, 0.5, 0.8, 0.8], [0.0, 0.5, 0.8])
    assert shares.tolist() == [1.0, 0.5, 0.0]
    wilson = stats.binomtest(2, 4).proportion_ci(method="wilson")
    assert (low[1], high[1]) == pytest.approx((wilson.low, wilson.high))
    assert low[0] < 0.6 and high[2] > 0.4, "four of four runs are no certainty"


def test_holms_adjusted_p_values_are_those_of_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0] and holm([]) == []


def test_a_difference_may_be_called_alone_and_not_in_a_family() -> None:
    faint = paired_difference({0: 1.0, 1: 2.0, 2: 3.0, 3: 1.5, 4: 2.5}, {0: 0.5, 1: 1.9, 2: 2.4, 3: 1.2, 4: 2.3})
    nothing = paired_difference(VALUES, BASELINE)
    assert 0.01 < faint.p < 0.05 and corrected([faint])[0].distinguishable
    assert not any(difference.distinguishable for difference in corrected([faint, *[nothing] * 6]))


def test_a_running_mean_waits_for_its_window() -> None:
    means = running_mean(np.array([1.0, 2.0, 6.0, 4.0]), 2)
    assert math.isnan(means[0]) and means[1:].tolist() == [1.5, 4.0, 5.0]
    with pytest.raises(ValueError, match="window of 5 does not fit 4"):
        running_mean(np.ones(4), 5)


def test_a_threshold_is_reached_between_the_versions_that_were_evaluated() -> None:
    samples, accuracies = np.array([0.0, 10, 20, 30]), np.array([0.1, 0.3, 0.7, 0.6])
    assert crossing(samples, accuracies, 0.5) == 15 and crossing(samples, accuracies, 0.7) == 20
    assert crossing(samples, accuracies, 0.1) == 0 and crossing(samples, accuracies, 0.95) == math.inf
    assert crossing(samples, np.array([0.0, 0.1, 0.1 + 0.2, 1.0]), 0.3) == pytest.approx(20)


def test_a_rate_leaves_warm_up_out_and_says_where_nothing_else_is_left() -> None:
    seconds, samples = np.array([10.0, 11.0, 12.0, 13.0]), np.full(4, 8.0)
    assert steady_rate(seconds, samples, warmup=1) == 8.0
    assert steady_rate(seconds, samples, warmup=0) == pytest.approx(32 / 13)
    assert steady_rate(seconds, samples, warmup=4) == pytest.approx(32 / 13)
    assert has_steady_part(5, 4) and not has_steady_part(4, 4)


def test_drift_compares_thirds_and_overlooks_a_single_slow_iteration() -> None:
    durations = np.concatenate([[50.0, 50.0], np.full(10, 1.0), np.full(10, 2.0), np.full(10, 3.0)])
    assert drift(durations, warmup=2) == pytest.approx(3.0)
    still = np.ones(32)
    still[30] = 100.0
    assert drift(still, warmup=2) == 1.0
    assert drift(durations[:10], warmup=2) == 1.0


def test_outliers_are_ten_robust_standard_deviations_away() -> None:
    values = [10.0, 10.2, 9.9, 10.1, 14.0]
    assert 0.6745 * 3.9 / 0.1 > OUTLIER_Z > 0.6745 * 0.2 / 0.1
    assert outliers(values) == [4]
    assert outliers(values, least=0.5) == []
    assert outliers([1.0, 9.0, 1.0]) == [], "of three, any one may be the odd one"
    assert outliers([1.0, 1.0, 1.0, 1.0, 2.0]) == [4]


def test_outliers_are_rare_among_five_normal_values() -> None:
    rng = np.random.default_rng(0)
    called = [bool(outliers(values)) for values in rng.normal(100, 1, (2000, 5))]
    assert np.mean(called) < 0.1
    assert not any(outliers(values, least=0.05) for values in rng.normal(100, 1, (2000, 5)))


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
        wrong += any(difference.distinguishable for difference in corrected(pairs))
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


# -- equivalence


@given(st.floats(-3, 3), st.floats(0.01, 3), st.integers(1, 30), st.floats(0.01, 3))
def test_two_one_sided_tests_say_equal_where_the_90_percent_interval_lies_within_the_margin(
    value: float, error: float, freedom: int, margin: float
) -> None:
    p = equivalence_p(value, error, freedom, margin)
    one, other = (float(stats.t.sf((margin + sign * value) / error, freedom)) for sign in (1, -1))
    assert p == pytest.approx(max(one, other)) == pytest.approx(equivalence_p(-value, error, freedom, margin))
    half = float(stats.t.ppf(0.95, freedom)) * error
    if abs(margin - abs(value) - half) > 1e-9:
        assert (p < 0.05) == (abs(value) + half < margin)
    assert equivalence_p(value, error, freedom, 2 * margin) <= p


@pytest.mark.parametrize(("truth", "share"), [(0.02, 0.05), (-0.02, 0.05), (0.03, 0.0), (0.0, 1.0)])
def test_what_differs_by_the_margin_is_called_equal_once_in_twenty(truth: float, share: float) -> None:
    rng, repeats = np.random.default_rng(5), 3000
    base = rng.normal(1.0, 0.2, (repeats, 5))  # a seed's own level, which pairs take out
    ratios = base * np.exp(math.copysign(math.log1p(abs(truth)), truth) + rng.normal(0, 0.004, (repeats, 5)))
    called = sum(
        paired_ratio(dict(enumerate(values)), dict(enumerate(others)), 0.02).equal
        for values, others in zip(ratios, base, strict=True)
    )
    assert abs(called / repeats - share) < error(repeats, 0.05)


def test_equality_is_called_of_a_family_and_never_of_fewer_than_three_seeds() -> None:
    close = {seed: value * (1.001 + 0.0002 * seed) for seed, value in VALUES.items()}
    wide = {seed: value * (1 + 0.014 * (-1) ** seed) for seed, value in VALUES.items()}
    one, other = (paired_ratio(values, VALUES, 0.02) for values in (close, wide))
    assert one.equal and not paired_ratio(close, VALUES).equal and not other.distinguishable
    assert other.p_equal == pytest.approx(0.034, abs=0.001) and other.equal
    assert [found.equal for found in corrected([other, one, other])] == [False, True, False]
    two = paired_ratio({0: close[0], 1: close[1]}, {0: VALUES[0], 1: VALUES[1]}, 0.02)
    assert not two.equal and not two.judged and not two.distinguishable
