"""Estimates from few repeated runs, each with its interval: means, interquartile means, shares; and outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special, stats
from scipy.optimize.elementwise import find_root

CONFIDENCE = 0.95
"""Confidence of every interval."""

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

    def within(self, low: float, high: float) -> Interval:
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
    within every stratum. Few seeds make this interval too narrow: docs/statistics.md says by how much.
    """

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
    2021, section 4.3: the Mann-Whitney statistic over its maximum). Infinities have ranks like other values.

    Interval: method 5 of Newcombe, see `pair_share_bounds`. A bootstrap would claim certainty, [1, 1], wherever five
    runs beat five.
    """
    one, other = np.asarray(values, dtype=np.float64)[:, None], np.asarray(baseline, dtype=np.float64)[None, :]
    if not one.size or not other.size:
        raise ValueError("a side has no run: there is no probability that it is better")
    share = float(np.mean((one > other) + 0.5 * (one == other)))
    low, high = pair_share_bounds(np.array(share), one.size, other.size)
    return Interval(share, float(low), float(high))


def pair_share_bounds(share: np.ndarray, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds for shares of the pairs of m with n runs, float64 [...]: the score-like interval with the variance of
    Hanley and McNeil, method 5 of Newcombe (Statistics in Medicine 25, 2006, 559-573)."""
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
    bounds = stats.binomtest(count, of).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(count / of, float(bounds.low), float(bounds.high))


def outliers(values: Values, least: float = 0.0) -> list[int]:
    """Indices of values that are OUTLIER_Z robust standard deviations from the median, and by more than `least` of it;
    none of fewer than four values.

    The modified z-score is 0.6745 (x - median) / MAD (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size < 4:
        return []
    median = np.median(array)
    away = np.abs(array - median)
    spread = np.median(away)
    far = (0.6745 * away > OUTLIER_Z * spread) & (away > least * abs(median))
    return [int(index) for index in np.flatnonzero(far)]
