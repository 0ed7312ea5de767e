"""Intervals, differences and shares on fixed data (bench_intervals: how often they hold a truth), and along one run."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from harness.comparison import statistics
from harness.comparison.statistics import Interval, crossing, holm, paired_difference

VALUES = {0: 0.886, 1: 0.904, 2: 0.871, 3: 0.893, 4: 0.880}
BASELINE = {0: 0.879, 1: 0.887, 2: 0.876, 3: 0.870, 4: 0.869}
SLEEP = (  # "Student", The probable error of a mean, Biometrika 6 (1908): hvalues of sleep gained by two drugs
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)


def test_the_mean_of_seeds_has_the_t_interval_and_one_seed_none() -> None:
    values = list(VALUES.values())
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    interval = statistics.mean_interval(values)
    assert (interval.value, interval.low, interval.high) == pytest.approx((np.mean(values), low, high), rel=1e-12)
    assert statistics.mean_interval([3.0]) == Interval(3.0, -math.inf, math.inf)
    assert not statistics.mean_interval([3.0]).bounded
    with pytest.raises(ValueError, match="inf"):
        statistics.mean_interval([1.0, math.inf])
    with pytest.raises(ValueError, match="no mean"):
        statistics.mean_interval([])


def test_a_paired_difference_is_the_paired_t_test_of_seeds_that_both_have() -> None:
    expected = stats.ttest_rel(list(VALUES.values()), list(BASELINE.values()))
    bounds = expected.confidence_interval(0.95)
    found = paired_difference(VALUES, BASELINE)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.interval.low, found.interval.high) == pytest.approx((bounds.low, bounds.high))
    assert found.paired and found.per_seed[2] == pytest.approx(-0.005)
    assert not found.distinguishable
    second, first = (dict(enumerate(drug)) for drug in reversed(SLEEP))
    found = paired_difference(second, first)
    assert found.interval.value == pytest.approx(1.58)
    assert found.p == pytest.approx(0.00283, abs=5e-6)  # t = 4.062 with 9 degrees of freedom
    assert found.distinguishable
    assert paired_difference({0: 2.0, 1: 3.0, 7: 99.0}, {0: 1.0, 1: 2.5, 8: 0.0}).per_seed == {0: 1.0, 1: 0.5}
    with pytest.raises(ValueError, match="no seed in common"):
        paired_difference({0: 1.0}, {1: 1.0})


def test_a_ratio_is_the_difference_of_logarithms() -> None:
    logs = paired_difference(
        {seed: math.log(value) for seed, value in VALUES.items()}, {s: math.log(v) for s, v in BASELINE.items()}
    )
    ratio = statistics.paired_ratio(VALUES, BASELINE)
    assert ratio.none == 1.0 and ratio.p == pytest.approx(logs.p)
    assert ratio.interval.high == pytest.approx(math.exp(logs.interval.high))
    assert ratio.per_seed[0] == pytest.approx(0.886 / 0.879)
    with pytest.raises(ValueError, match="not positive"):
        statistics.paired_ratio({0: 0.0}, {0: 1.0})


def test_groups_without_a_seed_in_common_are_compared_by_welch() -> None:
    one, two = [5.0, 6.0, 7.5, 5.5], [4.0, 9.0, 1.0, 3.0, 2.0, 6.0]
    expected = stats.ttest_ind(one, two, equal_var=False)
    found = statistics.group_difference(one, two)
    t = expected.statistic
    assert found.p == pytest.approx(2 * stats.t.sf(t, math.floor(expected.df)))
    assert expected.pvalue < found.p < expected.pvalue * 1.1, "degrees of freedom are rounded down"
    assert not found.paired
    assert statistics.group_ratio([2.0, 2.0], [1.0, 1.0]).interval.value == pytest.approx(2.0)
    assert not statistics.group_difference([1.0], [2.0, 3.0]).distinguishable


def test_equal_values_have_no_difference_and_equal_differences_are_one_of_three_seeds() -> None:
    nearly = {seed: value * (1 + 1e-14) for seed, value in VALUES.items()}
    assert paired_difference(nearly, VALUES).interval == Interval(0.0, 0.0, 0.0)
    assert not statistics.paired_ratio(nearly, VALUES).distinguishable
    assert statistics.group_difference([1.0, 1.0], [1.0 + 1e-12] * 2).interval == Interval(0.0, 0.0, 0.0)
    # Satterthwaite's come out a hair below 3 here, and of two seeds below 1.
    values = [0.992, 0.065, 0.198, 0.594]
    _, low, high = statistics.t_bounds(np.array(values))
    found = statistics.group_difference(values, [0.0, 0.0]).interval
    assert (found.low, found.high) == pytest.approx((low, high))
    # Of two, counts differ by the same by chance.
    values, baseline = {0: 0.59375, 1: 0.65625, 2: 0.71875}, {0: 0.5, 1: 0.5625, 2: 0.625}
    found = paired_difference(values, baseline)
    assert found.distinguishable and found.interval == Interval(0.09375, 0.09375, 0.09375)
    two = paired_difference({0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.6})  # the same but for rounding
    assert not two.distinguishable and two.p == 1.0 and not two.interval.bounded
    assert paired_difference({0: 0.6, 1: 0.7}, {0: 0.6, 1: 0.7}).interval == Interval(0.0, 0.0, 0.0)


def test_the_bootstrap_keeps_to_its_strata_and_profiles_count_runs_above() -> None:
    interval = statistics.iqm_interval([[1.0] * 5, [3.0] * 5])
    assert (interval.value, interval.low, interval.high) == (2.0, 2.0, 2.0)
    shares, low, high = statistics.performance_profile([0.2, 0.5, 0.8, 0.8], [0.0, 0.5, 0.8])
    assert shares.tolist() == [1.0, 0.5, 0.0]
    wilson = stats.binomtest(2, 4).proportion_ci(method="wilson")
    assert (low[1], high[1]) == pytest.approx((wilson.low, wilson.high))
    assert low[0] < 0.6 and high[2] > 0.4, "four of four runs are no certainty"


def test_the_probability_of_improvement_is_the_mann_whitney_statistic() -> None:
    values, baseline = [1.0, 3.0, 3.0, 8.0], [2.0, 3.0, 0.0, 5.0, 9.0]
    interval = statistics.probability_of_improvement(values, baseline)
    assert interval.value == pytest.approx(stats.mannwhitneyu(values, baseline).statistic / 20)
    opposite = statistics.probability_of_improvement(baseline, values)
    assert (opposite.low, opposite.high) == pytest.approx((1 - interval.high, 1 - interval.low))
    assert statistics.probability_of_improvement([math.inf, math.inf], [math.inf]).value == 0.5


@pytest.mark.parametrize(("values", "baseline"), [([1, 4, 6, 7, 9], [2, 3, 5, 8, 0]), ([5, 6, 7], [1, 2, 3, 4])])
def test_its_bounds_solve_newcombes_equation(values: list[float], baseline: list[float]) -> None:
    interval, m, n = statistics.probability_of_improvement(values, baseline), len(values), len(baseline)

    def excess(theta: float) -> float:
        spread = 1 + ((m + n) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (interval.value - theta) ** 2 - stats.norm.ppf(0.975) ** 2 * theta * (1 - theta) * spread / (m * n)

    assert interval.low == pytest.approx(optimize.brentq(excess, 1e-9, interval.value - 1e-9))
    if interval.value < 1:
        assert interval.high == pytest.approx(optimize.brentq(excess, interval.value + 1e-9, 1 - 1e-9))
    else:
        assert interval.high == 1.0 and interval.low < 0.8, "three runs that beat four are no certainty"


def test_holms_p_values_are_those_of_a_worked_example_and_a_family_calls_less() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0] and holm([]) == []
    faint = paired_difference({0: 1.0, 1: 2.0, 2: 3.0, 3: 1.5, 4: 2.5}, {0: 0.5, 1: 1.9, 2: 2.4, 3: 1.2, 4: 2.3})
    nothing = paired_difference(VALUES, BASELINE)
    assert 0.01 < faint.p < 0.05 and statistics.corrected([faint])[0].distinguishable
    assert not any(difference.distinguishable for difference in statistics.corrected([faint, *[nothing] * 6]))


def test_running_means_and_thresholds_are_read_along_a_run() -> None:
    means = statistics.running_mean(np.array([1.0, 2.0, 6.0, 4.0]), 2)
    assert math.isnan(means[0]) and means[1:].tolist() == [1.5, 4.0, 5.0]
    with pytest.raises(ValueError, match="window of 5 does not fit 4"):
        statistics.running_mean(np.ones(4), 5)
    samples, accuracies = np.array([0.0, 10, 20, 30]), np.array([0.1, 0.3, 0.7, 0.6])
    assert crossing(samples, accuracies, 0.5) == 15 and crossing(samples, accuracies, 0.7) == 20
    assert crossing(samples, accuracies, 0.1) == 0 and crossing(samples, accuracies, 0.95) == math.inf
    assert crossing(samples, np.array([0.0, 0.1, 0.1 + 0.2, 1.0]), 0.3) == pytest.approx(20)


def test_rates_leave_warm_up_out_and_drift_compares_thirds() -> None:
    seconds, samples = np.array([10.0, 11.0, 12.0, 13.0]), np.full(4, 8.0)
    assert statistics.steady_rate(seconds, samples, warmup=1) == 8.0
    assert statistics.steady_rate(seconds, samples, warmup=0) == pytest.approx(32 / 13)
    assert statistics.steady_rate(seconds, samples, warmup=4) == pytest.approx(32 / 13)
    assert statistics.has_steady_part(5, 4) and not statistics.has_steady_part(4, 4)
    durations = np.concatenate([[50.0, 50.0], np.full(10, 1.0), np.full(10, 2.0), np.full(10, 3.0)])
    assert statistics.drift(durations, warmup=2) == pytest.approx(3.0)
    still = np.ones(32)
    still[30] = 100.0
    assert statistics.drift(still, warmup=2) == 1.0
    assert statistics.drift(durations[:10], warmup=2) == 1.0


def test_outliers_are_ten_robust_standard_deviations_away() -> None:
    values = [10.0, 10.2, 9.9, 10.1, 14.0]
    assert 0.6745 * 3.9 / 0.1 > statistics.OUTLIER_Z > 0.6745 * 0.2 / 0.1
    assert statistics.outliers(values) == [4]
    assert statistics.outliers(values, least=0.5) == []
    assert statistics.outliers([1.0, 9.0, 1.0]) == [], "of three, any one may be the odd one"
    assert statistics.outliers([1.0, 1.0, 1.0, 1.0, 2.0]) == [4]


def error(repeats: int, rate: float = 0.95) -> float:
    """Four binomial standard errors."""
    return 4 * math.sqrt(rate * (1 - rate) / repeats)


# -- equivalence


@given(st.floats(-3, 3), st.floats(0.01, 3), st.integers(1, 30), st.floats(0.01, 3))
def test_two_one_sided_tests_say_equal_where_the_90_percent_interval_lies_within_the_margin(
    value: float, error: float, freedom: int, margin: float
) -> None:
    p = statistics.equivalence_p(value, error, freedom, margin)
    one, other = (float(stats.t.sf((margin + sign * value) / error, freedom)) for sign in (1, -1))
    assert (
        p == pytest.approx(max(one, other)) == pytest.approx(statistics.equivalence_p(-value, error, freedom, margin))
    )
    half = float(stats.t.ppf(0.95, freedom)) * error
    if abs(margin - abs(value) - half) > 1e-9:
        assert (p < 0.05) == (abs(value) + half < margin)
    assert statistics.equivalence_p(value, error, freedom, 2 * margin) <= p


def test_equality_is_called_of_a_family_and_never_of_fewer_than_three_seeds() -> None:
    close = {seed: value * (1.001 + 0.0002 * seed) for seed, value in VALUES.items()}
    wide = {seed: value * (1 + 0.014 * (-1) ** seed) for seed, value in VALUES.items()}
    one, other = (statistics.paired_ratio(values, VALUES, 0.02) for values in (close, wide))
    assert one.equal and not statistics.paired_ratio(close, VALUES).equal and not other.distinguishable
    assert other.p_equal == pytest.approx(0.034, abs=0.001) and other.equal
    assert [found.equal for found in statistics.corrected([other, one, other])] == [False, True, False]
    two = statistics.paired_ratio({0: close[0], 1: close[1]}, {0: VALUES[0], 1: VALUES[1]}, 0.02)
    assert not two.equal and not two.judged and not two.distinguishable
