"""Statistics of repeated runs, pure functions of arrays: estimates with their intervals, outliers, differences between
two groups (paired by seed where seeds are shared, corrected for several), and what is read along one run.

Of SciPy, what takes a second to import is imported where it is used: single runs need means with their intervals only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from scipy import special

CONFIDENCE = 0.95  # confidence of every interval
OUTLIER_Z = 10.0
"""Modified z-score beyond which a value is an outlier, as in hyperfine (github.com/sharkdp/hyperfine). Of few values,
the usual 3.5 flags many."""

Values = Sequence[float] | np.ndarray


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval. One value alone has no interval: its bounds are infinite."""

    value: float
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        """Whether both bounds are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def within(self, low: float, high: float) -> Self:
        """The part of it that is possible, which covers just as often. One without bounds stays without."""
        if not self.bounded:
            return self
        return replace(self, low=max(low, self.low), high=min(high, self.high))

    def excludes(self, value: float) -> bool:
        """Whether the value lies outside."""
        return not self.low <= value <= self.high


def t_critical(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| <= t) = confidence, for `freedom` degrees of freedom of Student's distribution."""
    return float(special.stdtrit(freedom, (1 + confidence) / 2))


def t_bounds(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lower and upper bound of the t interval over the last axis, float64 [...] each. mean -+ t(n - 1) s /
    sqrt(n), where s is the sample's standard deviation. With n = 1 the bounds are infinite."""
    values = np.asarray(values, dtype=np.float64)
    count = values.shape[-1]
    if not count:
        raise ValueError("no value: there is nothing to take a mean of")
    mean = values.mean(axis=-1)
    if count == 1:
        return mean, np.full_like(mean, -math.inf), np.full_like(mean, math.inf)
    half = t_critical(count - 1) * values.std(axis=-1, ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def mean_interval(values: Values) -> Interval:
    """The mean of [n] independent values with its t interval. Raises ValueError if there is none, or one that is not
    finite: infinities are counted, not averaged."""
    mean, low, high = t_bounds(finite(values))
    return Interval(float(mean), float(low), float(high))


def finite(values: Values) -> np.ndarray:
    """The values as float64 [n]. Raises ValueError where there is none, or one that is not finite."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size or not np.isfinite(array).all():
        raise ValueError(f"{array.tolist()} has no mean: values must be there, and finite")
    return array


def iqm_interval(scores: Sequence[Values], *, draws: int = 10_000, seed: int = 0) -> Interval:
    """Interquartile mean of all scores (floor(n / 4) cut off at each end), and the percentiles of its stratified
    bootstrap (Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", NeurIPS 2021,
    section 4).

    scores: [strata][seeds], where a stratum is a task or whatever else was run repeatedly; each draw resamples seeds
    within every stratum. Few seeds make this interval too narrow: docs/statistics.md says by how much."""

    from scipy import stats

    def iqm(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
        return stats.trim_mean(np.concatenate(strata, axis=axis), 0.25, axis=axis)

    strata = [np.asarray(stratum, dtype=np.float64) for stratum in scores]
    bounds = stats.bootstrap(
        strata,
        iqm,
        n_resamples=draws,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(iqm(*strata)), float(bounds.low), float(bounds.high))


def probability_of_improvement(values: Values, baseline: Values) -> Interval:
    """P(a run has a larger value than one of the baseline), a tie counting half, over all pairs of runs (Agarwal et al.
    2021, section 4.3: the Mann-Whitney statistic over its maximum). Infinities have ranks like other values. Interval:
    method 5 of Newcombe, see `pair_share_bounds`. A bootstrap would claim certainty, [1, 1], wherever five runs beat
    five."""
    one, other = np.asarray(values, dtype=np.float64)[:, None], np.asarray(baseline, dtype=np.float64)[None, :]
    if not one.size or not other.size:
        raise ValueError("a side has no run: there is no probability that it is better")
    share = float(np.mean((one > other) + 0.5 * (one == other)))
    low, high = pair_share_bounds(np.array(share), one.size, other.size)
    return Interval(share, float(low), float(high))


def pair_share_bounds(share: np.ndarray, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds for shares of the pairs of m with n runs, float64 [...]: the score-like interval with the variance of
    Hanley and McNeil, method 5 of Newcombe (Statistics in Medicine 25, 2006, 559-573)."""
    from scipy.optimize.elementwise import find_root

    share = np.asarray(share, dtype=np.float64)
    z = special.ndtri((1 + CONFIDENCE) / 2)

    def excess(theta: np.ndarray, share: np.ndarray) -> np.ndarray:
        spread = 1 + ((m + n) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return np.abs(share - theta) - z * np.sqrt(theta * (1 - theta) * spread / (m * n))

    inside = 1e-12  # towards the share: at 0 and 1 themselves, theta = share is a root too
    low = find_root(excess, (0.0, share * (1 - inside)), args=(share,)).x
    high = find_root(excess, (1 - (1 - share) * (1 - inside), 1.0), args=(share,)).x
    return low, high


def performance_profile(scores: Values, taus: Values) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The share of [n] runs that score above each tau (Agarwal et al. 2021, section 4.2), and Wilson's interval for
    each tau by itself (JASA 22, 1927), which stays open where all or none do: float64 [taus] each."""
    array = np.asarray(scores, dtype=np.float64)
    above = np.sum(array[:, None] > np.asarray(taus), axis=0)
    shares = [share_interval(count, array.size) for count in range(array.size + 1)]
    bounds = np.array([(share.low, share.high) for share in shares])
    return above / array.size, bounds[above, 0], bounds[above, 1]


def share_interval(count: int, of: int) -> Interval:
    """A share of independent runs with Wilson's interval."""
    from scipy import stats

    bounds = stats.binomtest(count, of).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(count / of, float(bounds.low), float(bounds.high))


def outliers(values: Values, least: float = 0.0) -> list[int]:
    """Indices of values that are OUTLIER_Z robust standard deviations from the median, and by more than `least` of it;
    none of fewer than four values. The modified z-score is 0.6745 (x - median) / MAD (Iglewicz and Hoaglin, How to
    Detect and Handle Outliers, 1993)."""
    array = np.asarray(values, dtype=np.float64)
    if array.size < 4:
        return []
    median = np.median(array)
    away = np.abs(array - median)
    spread = np.median(away)
    far = (0.6745 * away > OUTLIER_Z * spread) & (away > least * abs(median))
    return [int(index) for index in np.flatnonzero(far)]


_ROUNDING = 1e-9  # values this close, relatively, are equal: simulated runs may differ in the order of additions only
FEWEST = 3
"""Seeds of which a difference is judged. Two have one degree of freedom; and where values are counts, as exact matches
are, two pairs differ by the same, without any scatter, by chance."""

MARGIN = 0.02
"""Difference that does not matter, unless another is set: a share of the baseline, or of shares two points."""

PerSeed = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """A cell against the baseline: `value - baseline`, or `value / baseline` for a ratio; `none` is the value that
    stands for no difference (0, or 1).

    per_seed: by seed, for pairs; empty where the two have no seed in common and were compared as groups.
    p: of the two-sided test that belongs to the interval. distinguishable: called a difference. p_equal: of two
    one-sided tests that it is as large as a margin, None where there is no margin; equal: called equal within it.
    judged: whether anything may be called at all."""

    interval: Interval
    p: float
    distinguishable: bool
    none: float = 0.0
    per_seed: PerSeed = field(default_factory=dict)
    p_equal: float | None = None
    equal: bool = False
    judged: bool = True

    @property
    def unjudged(self) -> Self:
        """The same figures, of which nothing is called."""
        return replace(self, distinguishable=False, equal=False, judged=False)

    @property
    def paired(self) -> bool:
        """Whether seeds are shared."""
        return bool(self.per_seed)


def paired_difference(values: PerSeed, baseline: PerSeed, margin: float | None = None) -> Difference:
    """The mean over seeds of `values - baseline`, paired by seed: the t interval and test of the differences, and the
    tests of their being smaller than `margin`. Seeds that only one of them has are left out. Raises ValueError if they
    have none in common."""
    pairs = _pairs(values, baseline)
    return _of_pairs({seed: 0.0 if _equal(a, b) else a - b for seed, (a, b) in pairs.items()}, margin)


def paired_ratio(values: PerSeed, baseline: PerSeed, margin: float | None = None) -> Difference:
    """The geometric mean over seeds of `values / baseline`: the t interval and test of its logarithm, and the tests of
    its lying between 1 / (1 + margin) and 1 + margin. Raises ValueError if they have no seed in common, or a value that
    is not positive."""
    pairs = _pairs(values, baseline)
    if min(min(pair) for pair in pairs.values()) <= 0:
        raise ValueError("a value is not positive: there is no ratio")
    logs = {seed: 0.0 if _equal(a, b) else math.log(a / b) for seed, (a, b) in pairs.items()}
    return _exponential(_of_pairs(logs, _log(margin)))


def group_difference(values: Sequence[float], baseline: Sequence[float], margin: float | None = None) -> Difference:
    """`mean(values) - mean(baseline)` of two groups without pairs: Welch's t interval and test (Biometrika 34, 1947).
    Degrees of freedom (Satterthwaite) are rounded down, which widens it, but not below the smaller group's."""
    one, other = finite(values), finite(baseline)
    means = float(one.mean()), float(other.mean())
    mean = 0.0 if _equal(*means) else means[0] - means[1]
    if min(one.size, other.size) == 1:
        return Difference(Interval(mean, -math.inf, math.inf), p=1.0, distinguishable=False).unjudged
    parts = np.array([one.var(ddof=1) / one.size, other.var(ddof=1) / other.size])
    error = math.sqrt(parts.sum())
    freedom = parts.sum() ** 2 / np.sum(parts**2 / np.array([one.size - 1, other.size - 1])) if error else 1
    fewest = min(one.size, other.size)
    return _tested(mean, error, max(int(freedom + _ROUNDING), fewest - 1), margin, fewest)


def group_ratio(values: Sequence[float], baseline: Sequence[float], margin: float | None = None) -> Difference:
    """The ratio of geometric means of two groups without pairs, by `group_difference` of logarithms."""
    one, other = finite(values), finite(baseline)
    if min(one.min(), other.min()) <= 0:
        raise ValueError("a value is not positive: there is no ratio")
    return _exponential(group_difference(np.log(one).tolist(), np.log(other).tolist(), _log(margin)))


def equivalence_p(value: float, error: float, freedom: int, margin: float) -> float:
    """The p of two one-sided t tests that a mean of standard error `error` lies outside of -+ margin: the larger of the
    two. Below 0.05 where the mean's 90 % interval lies inside. Schuirmann, "A comparison of the two one-sided tests
    procedure and the power approach for assessing the equivalence of average bioavailability", Journal of
    Pharmacokinetics and Biopharmaceutics 15 (1987), 657-680."""
    room = margin - abs(value)
    if not error:
        return 0.0 if room > 0 else 1.0
    return float(special.stdtr(freedom, -room / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family: calling those below 0.05 errs at all, in any of them, in at most 5 % of families.
    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979),
    65-70."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return [float(p) for p in adjusted]


def corrected(family: Sequence[Difference]) -> list[Difference]:
    """The family with `distinguishable` only where Holm's adjusted p is below 0.05 as well: such a
    difference's own interval excludes no effect, always. Likewise `equal`, by the tests of equivalence, which are a
    family of their own. Intervals stay those of each by itself."""
    adjusted = holm([difference.p for difference in family])
    of_equal = iter(holm([difference.p_equal for difference in family if difference.p_equal is not None]))
    return [
        replace(
            difference,
            distinguishable=difference.distinguishable and p < 1 - CONFIDENCE,
            equal=difference.p_equal is not None and next(of_equal) < 1 - CONFIDENCE and difference.judged,
        )
        for difference, p in zip(family, adjusted, strict=True)
    ]


def _log(margin: float | None) -> float | None:
    return None if margin is None else math.log1p(margin)


def _pairs(values: PerSeed, baseline: PerSeed) -> dict[int, tuple[float, float]]:
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(values)} and {sorted(baseline)}")
    return {seed: (values[seed], baseline[seed]) for seed in seeds}


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)


def _of_pairs(per_seed: PerSeed, margin: float | None) -> Difference:
    values = finite(list(per_seed.values()))
    alike = float(np.ptp(values)) <= _ROUNDING * float(np.abs(values).max())
    if values.size == 1 or (alike and values.any() and values.size < FEWEST):
        interval = Interval(float(values.mean()), -math.inf, math.inf)
        return Difference(interval, p=1.0, distinguishable=False, per_seed=per_seed).unjudged
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    found = _tested(float(values.mean()), error, values.size - 1, margin, values.size)
    return replace(found, per_seed=per_seed)


def _tested(value: float, error: float, freedom: int, margin: float | None, seeds: int) -> Difference:
    """The t interval around `value`, the test of its being zero, and those of its being as large as `margin`. Without
    any scatter (error 0) it is a point. seeds: of the side that has fewer."""
    half = t_critical(freedom) * error
    interval = Interval(value, value - half, value + half)
    t = abs(value) / error if error else (math.inf if value else 0.0)
    p_equal = None if margin is None else equivalence_p(value, error, freedom, margin)
    equal = p_equal is not None and p_equal < 1 - CONFIDENCE
    p = 2 * float(special.stdtr(freedom, -t))
    found = Difference(interval, p, interval.excludes(0.0), p_equal=p_equal, equal=equal)
    return found if seeds >= FEWEST else found.unjudged


def _exponential(logs: Difference) -> Difference:
    """The ratio whose logarithm was tested. An unbounded interval reaches from 0 to infinity."""
    value, low, high = (math.exp(bound) for bound in (logs.interval.value, logs.interval.low, logs.interval.high))
    per_seed = {seed: math.exp(log) for seed, log in logs.per_seed.items()}
    return replace(logs, interval=Interval(value, low, high), none=1.0, per_seed=per_seed)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """float64 [n]: at each point the mean of the last `window` values, NaN until there are as many."""
    values = np.asarray(values, dtype=np.float64)
    if not 1 <= window <= values.size:
        raise ValueError(f"a window of {window} does not fit {values.size} values")
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    return np.concatenate([np.full(window - 1, math.nan), means])


def crossing(x: np.ndarray, y: np.ndarray, threshold: float) -> float:
    """The first x at which straight lines between points (x, y) are at the threshold or above; infinite if never."""
    there = np.flatnonzero(np.asarray(y) >= threshold - 1e-12)  # rounding in a share
    if not there.size:
        return math.inf
    first = int(there[0])
    if not first:
        return float(x[0])
    low, high = y[first - 1], y[first]
    return float(x[first - 1] + (x[first] - x[first - 1]) * min(1.0, (threshold - low) / (high - low)))


def steady_rate(seconds: np.ndarray, amounts: np.ndarray, warmup: int) -> float:
    """The amount per second after the first `warmup` iterations; over all of them if there are no more than those.
    seconds: float64 [n], when each iteration ended on a clock that began at 0; amounts: [n], what each made."""
    start = warmup if has_steady_part(len(seconds), warmup) else 0
    since = float(seconds[start - 1]) if start else 0.0
    return float(np.sum(amounts[start:])) / (float(seconds[-1]) - since)


def has_steady_part(iterations: int, warmup: int) -> bool:
    """Whether anything is left when warm-up iterations are left out."""
    return iterations > warmup


def drift(durations: np.ndarray, warmup: int) -> float:
    """Median of the last third of the iterations after warm-up over that of the first third; 1 for fewer than nine.
    Medians, so that a single slow iteration is no drift."""
    steady = np.asarray(durations, dtype=np.float64)[warmup:]
    third = steady.size // 3
    return float(np.median(steady[-third:]) / np.median(steady[:third])) if third >= 3 else 1.0
