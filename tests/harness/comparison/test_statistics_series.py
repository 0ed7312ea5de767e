"""Along one run: running means, thresholds, rates without warm-up, drift, outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.comparison.statistics.outliers import modified_z, outliers
from harness.comparison.statistics.series import drift, has_steady_part, reach, running_mean, steady_rate


def test_a_running_mean_waits_for_its_window() -> None:
    means = running_mean(np.array([1.0, 2.0, 6.0, 4.0]), 2)
    assert math.isnan(means[0]) and means[1:].tolist() == [1.5, 4.0, 5.0]
    with pytest.raises(ValueError, match="window of 5 does not fit 4"):
        running_mean(np.ones(4), 5)


def test_a_threshold_is_reached_by_the_running_mean_and_not_by_a_lucky_point() -> None:
    samples, rewards = np.array([10, 20, 30, 40, 50]), np.array([0.1, 0.9, 0.2, 0.8, 0.8])
    assert reach(samples, rewards, 0.8) == 20
    assert reach(samples, rewards, 0.8, window=2) == 50
    assert reach(samples, rewards, 0.95) == math.inf
    assert reach(samples, np.full(5, 0.1), 0.1, window=3) == 30, "rounding keeps nobody away"


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
    z = modified_z(values)
    assert z[4] == pytest.approx(0.6745 * 3.9 / 0.1)
    assert outliers(values) == [4]
    assert outliers(values, least=0.5) == []
    assert outliers([1.0, 9.0, 1.0]) == [], "of three, any one may be the odd one"
    assert outliers([1.0, 1.0, 1.0, 1.0, 2.0]) == [4]


def test_outliers_are_rare_among_five_normal_values() -> None:
    rng = np.random.default_rng(0)
    called = [bool(outliers(values)) for values in rng.normal(100, 1, (2000, 5))]
    assert np.mean(called) < 0.1
    assert not any(outliers(values, least=0.05) for values in rng.normal(100, 1, (2000, 5)))
