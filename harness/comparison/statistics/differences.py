"""Differences between two groups of repeated runs: paired by seed where seeds are shared, corrected for several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import special

from harness.comparison.statistics.estimates import CONFIDENCE, Interval, finite, t_critical

_ROUNDING = 1e-9
"""Values this close, relatively, are equal: simulated runs may differ in the order of additions only."""

_FEWEST_ALIKE = 3
"""Pairs that differ by the same, without any scatter, which shows something: two do by chance, where values are counts,
as exact matches are."""

PerSeed = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """A cell against the baseline: `value - baseline`, or `value / baseline` for a ratio; `none` is the value that
    stands for no difference (0, or 1).

    per_seed: by seed, for pairs; empty where the two have no seed in common and were compared as groups.
    p: of the two-sided test that belongs to the interval. distinguishable: called a difference.
    """

    interval: Interval
    p: float
    distinguishable: bool
    none: float = 0.0
    per_seed: PerSeed = field(default_factory=dict)

    @property
    def paired(self) -> bool:
        """Whether seeds are shared."""
        return bool(self.per_seed)


def paired_difference(values: PerSeed, baseline: PerSeed) -> Difference:
    """The mean over seeds of `values - baseline`, paired by seed: the t interval and test of the differences.

    Seeds that only one of them has are left out. Raises ValueError if they have none in common.
    """
    pairs = _pairs(values, baseline)
    return _of_pairs({seed: 0.0 if _equal(a, b) else a - b for seed, (a, b) in pairs.items()})


def paired_ratio(values: PerSeed, baseline: PerSeed) -> Difference:
    """The geometric mean over seeds of `values / baseline`: the t interval and test of its logarithm.

    Raises ValueError if they have no seed in common, or a value that is not positive.
    """
    pairs = _pairs(values, baseline)
    if min(min(pair) for pair in pairs.values()) <= 0:
        raise ValueError("a value is not positive: there is no ratio")
    logs = {seed: 0.0 if _equal(a, b) else math.log(a / b) for seed, (a, b) in pairs.items()}
    return _exponential(_of_pairs(logs))


def group_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """`mean(values) - mean(baseline)` of two groups without pairs: Welch's t interval and test (Biometrika 34, 1947).

    Degrees of freedom (Satterthwaite) are rounded down, which widens the interval; they are never fewer than the
    smaller group's.
    """
    one, other = finite(values), finite(baseline)
    means = float(one.mean()), float(other.mean())
    mean = 0.0 if _equal(*means) else means[0] - means[1]
    if min(one.size, other.size) == 1:
        return Difference(Interval(mean, -math.inf, math.inf), p=1.0, distinguishable=False)
    parts = np.array([one.var(ddof=1) / one.size, other.var(ddof=1) / other.size])
    error = math.sqrt(parts.sum())
    freedom = parts.sum() ** 2 / np.sum(parts**2 / np.array([one.size - 1, other.size - 1])) if error else 1
    return _tested(mean, error, max(int(freedom + _ROUNDING), min(one.size, other.size) - 1))


def group_ratio(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The ratio of geometric means of two groups without pairs, by `group_difference` of logarithms."""
    one, other = finite(values), finite(baseline)
    if min(one.min(), other.min()) <= 0:
        raise ValueError("a value is not positive: there is no ratio")
    return _exponential(group_difference(np.log(one).tolist(), np.log(other).tolist()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family: calling those below 0.05 errs at all, in any of them, in at most 5 % of families.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979), 65-70.
    """
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return [float(p) for p in adjusted]


def corrected(family: Sequence[Difference]) -> list[Difference]:
    """The family with `distinguishable` only where Holm's adjusted p is below 0.05 as well: such a
    difference's own interval excludes no effect, always. Intervals stay those of each by itself."""
    adjusted = holm([difference.p for difference in family])
    return [
        replace(difference, distinguishable=difference.distinguishable and p < 1 - CONFIDENCE)
        for difference, p in zip(family, adjusted, strict=True)
    ]


def _pairs(values: PerSeed, baseline: PerSeed) -> dict[int, tuple[float, float]]:
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(values)} and {sorted(baseline)}")
    return {seed: (values[seed], baseline[seed]) for seed in seeds}


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)


def _of_pairs(per_seed: PerSeed) -> Difference:
    values = finite(list(per_seed.values()))
    alike = float(np.ptp(values)) <= _ROUNDING * float(np.abs(values).max())
    if values.size == 1 or (alike and values.any() and values.size < _FEWEST_ALIKE):
        interval = Interval(float(values.mean()), -math.inf, math.inf)
        return Difference(interval, p=1.0, distinguishable=False, per_seed=per_seed)
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    return replace(_tested(float(values.mean()), error, values.size - 1), per_seed=per_seed)


def _tested(value: float, error: float, freedom: int) -> Difference:
    """The t interval around `value` and the test of its being zero. Without any scatter (error 0) it is a point."""
    half = t_critical(freedom) * error
    interval = Interval(value, value - half, value + half)
    t = abs(value) / error if error else (math.inf if value else 0.0)
    return Difference(interval, 2 * float(special.stdtr(freedom, -t)), interval.excludes(0.0))


def _exponential(logs: Difference) -> Difference:
    """The ratio whose logarithm was tested. An unbounded interval reaches from 0 to infinity."""
    value, low, high = (math.exp(bound) for bound in (logs.interval.value, logs.interval.low, logs.interval.high))
    per_seed = {seed: math.exp(log) for seed, log in logs.per_seed.items()}
    interval = Interval(value, low, high)
    return Difference(interval, logs.p, logs.distinguishable, none=1.0, per_seed=per_seed)
