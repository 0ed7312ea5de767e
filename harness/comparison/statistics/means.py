"""Means of few repeated runs, and differences of them: Student's t, of pairs where there are pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from harness.comparison.statistics import student
from harness.comparison.statistics.interval import Difference, Interval

_ROUNDING = 1e-9
"""Of two values this close, relatively, neither is larger: simulated runs may differ in the order of additions only."""


def t_bounds(values: np.ndarray, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lower and upper bound of the t interval over the last axis, float64 [...] each.

    mean -+ t(n - 1) s / sqrt(n), where s is the sample's standard deviation. With n = 1 the bounds are infinite.
    """
    values = np.asarray(values, dtype=np.float64)
    count = values.shape[-1]
    if not count:
        raise ValueError("no value: there is nothing to take a mean of")
    mean = values.mean(axis=-1)
    if count == 1:
        return mean, np.full_like(mean, -math.inf), np.full_like(mean, math.inf)
    half = student.critical(confidence, count - 1) * values.std(axis=-1, ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def mean_interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Interval:
    """The mean of [n] independent values with its t interval. Raises ValueError if there is none, or one that is not
    finite: infinities are counted, not averaged."""
    listed = _finite(values)
    mean, low, high = t_bounds(listed, confidence)
    return Interval(float(mean), float(low), float(high), confidence)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float], confidence: float = 0.95) -> Difference:
    """The mean over seeds of `ours - theirs`, paired by seed: the t interval and test of the differences.

    Seeds that only one of them has are left out. Raises ValueError if they have none in common.
    """
    return _of_pairs({seed: _minus(ours[seed], theirs[seed]) for seed in _common(ours, theirs)}, confidence)


def paired_ratio(ours: Mapping[int, float], theirs: Mapping[int, float], confidence: float = 0.95) -> Difference:
    """The geometric mean over seeds of `ours / theirs`: the t interval and test of its logarithm.

    Raises ValueError if they have no seed in common, or a value that is not positive.
    """
    seeds = _common(ours, theirs)
    if min(min(ours[seed], theirs[seed]) for seed in seeds) <= 0:
        raise ValueError("a value is not positive: there is no ratio")
    return _exponential(_of_pairs({seed: _log_ratio(ours[seed], theirs[seed]) for seed in seeds}, confidence))


def group_difference(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Difference:
    """`mean(ours) - mean(theirs)` of two groups without pairs: Welch's t interval and test (Biometrika 34, 1947).

    Degrees of freedom (Satterthwaite) are rounded down, which widens the interval.
    """
    one, two = _finite(ours), _finite(theirs)
    value = float(one.mean() - two.mean())
    if min(one.size, two.size) == 1:
        return Difference(Interval(value, -math.inf, math.inf, confidence), p=1.0, distinguishable=False)
    parts = np.array([one.var(ddof=1) / one.size, two.var(ddof=1) / two.size])
    error = math.sqrt(parts.sum())
    freedom = parts.sum() ** 2 / np.sum(parts**2 / np.array([one.size - 1, two.size - 1])) if error else 1
    return _tested(value, error, int(freedom), confidence)


def group_ratio(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Difference:
    """The ratio of geometric means of two groups without pairs, by `group_difference` of logarithms."""
    one, two = _finite(ours), _finite(theirs)
    if min(one.min(), two.min()) <= 0:
        raise ValueError("a value is not positive: there is no ratio")
    return _exponential(group_difference(np.log(one).tolist(), np.log(two).tolist(), confidence))


def _of_pairs(per_seed: Mapping[int, float], confidence: float) -> Difference:
    values = _finite(list(per_seed.values()))
    if values.size == 1:
        interval = Interval(float(values[0]), -math.inf, math.inf, confidence)
        return Difference(interval, p=1.0, distinguishable=False, per_seed=per_seed)
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    return _tested(float(values.mean()), error, values.size - 1, confidence, per_seed)


def _tested(
    value: float, error: float, freedom: int, confidence: float, per_seed: Mapping[int, float] | None = None
) -> Difference:
    """The t interval around `value` and the test of its being zero. Without any scatter (error 0) it is a point."""
    half = student.critical(confidence, freedom) * error
    interval = Interval(value, value - half, value + half, confidence)
    t = abs(value) / error if error else (math.inf if value else 0.0)
    return Difference(interval, student.two_sided_p(t, freedom), interval.excludes(0.0), per_seed=per_seed or {})


def _exponential(logs: Difference) -> Difference:
    """The ratio whose logarithm was tested. An unbounded interval reaches from 0 to infinity."""
    value, low, high = (math.exp(bound) for bound in (logs.interval.value, logs.interval.low, logs.interval.high))
    per_seed = {seed: math.exp(log) for seed, log in logs.per_seed.items()}
    interval = Interval(value, low, high, logs.interval.confidence)
    return Difference(interval, logs.p, logs.distinguishable, none=1.0, per_seed=per_seed)


def _common(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[int]:
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(ours)} and {sorted(theirs)}")
    return seeds


def _minus(ours: float, theirs: float) -> float:
    return 0.0 if math.isclose(ours, theirs, rel_tol=_ROUNDING) else ours - theirs


def _log_ratio(ours: float, theirs: float) -> float:
    return 0.0 if math.isclose(ours, theirs, rel_tol=_ROUNDING) else math.log(ours / theirs)


def _finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    listed = np.asarray(values, dtype=np.float64)
    if not listed.size or not np.isfinite(listed).all():
        raise ValueError(f"{listed.tolist()} has no mean: values must be there, and finite")
    return listed
