"""Shares and probabilities from few runs: their intervals stay honest where all runs agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from harness.comparison.statistics.interval import Interval

_HALVINGS = 60


def probability_of_improvement(
    ours: Sequence[float] | np.ndarray, theirs: Sequence[float] | np.ndarray, confidence: float = 0.95
) -> Interval:
    """P(a run of ours is larger than one of theirs), a tie counting half, over all pairs of runs (Agarwal et al. 2021,
    section 4.3: the Mann-Whitney statistic over its maximum).

    Interval: method 5 of Newcombe (Statistics in Medicine 25, 2006, 559-573), the score-like interval with the variance
    of Hanley and McNeil. A bootstrap would claim certainty, [1, 1], wherever five runs beat five. Infinities have ranks
    like other values.
    """
    one, two = np.asarray(ours, dtype=np.float64)[:, None], np.asarray(theirs, dtype=np.float64)[None, :]
    if not one.size or not two.size:
        raise ValueError("a side has no run: there is no probability that it is better")
    share = float(np.mean((one > two) + 0.5 * (one == two)))
    low, high = share_bounds(np.array(share), one.size, two.size, confidence)
    return Interval(share, float(low), float(high), confidence)


def share_bounds(share: np.ndarray, ours: int, theirs: int, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Newcombe's bounds for shares of pairs, float64 [...], out of ours x theirs runs."""
    z = _normal(confidence)
    runs = (ours + theirs) / 2 - 1

    def far(theta: np.ndarray) -> np.ndarray:
        spread = 1 + runs * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return np.abs(share - theta) > z * np.sqrt(theta * (1 - theta) * spread / (ours * theirs))

    def end(outside: float) -> np.ndarray:
        inner, outer = np.asarray(share, dtype=np.float64), np.full_like(share, outside, dtype=np.float64)
        for _ in range(_HALVINGS):
            middle = (inner + outer) / 2
            beyond = far(middle)
            inner, outer = np.where(beyond, inner, middle), np.where(beyond, middle, outer)
        return inner

    return end(0.0), end(1.0)


def share_interval(hits: int, runs: int, confidence: float = 0.95) -> Interval:
    """hits / runs with Wilson's score interval (JASA 22, 1927), which stays open where all or none are hits."""
    if not 0 <= hits <= runs or not runs:
        raise ValueError(f"{hits} of {runs} runs is no share")
    z2 = _normal(confidence) ** 2
    share = hits / runs
    centre = (share + z2 / (2 * runs)) / (1 + z2 / runs)
    half = math.sqrt(z2 * (share * (1 - share) / runs + z2 / (4 * runs**2))) / (1 + z2 / runs)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half), confidence)


def performance_profile(
    scores: Sequence[float] | np.ndarray, taus: Sequence[float] | np.ndarray, confidence: float = 0.95
) -> list[Interval]:
    """For each tau, the share of [n] runs that score above it (Agarwal et al. 2021, section 4.2), with Wilson's
    interval: for each tau by itself."""
    listed = np.asarray(scores, dtype=np.float64)
    return [share_interval(int(np.sum(listed > tau)), listed.size, confidence) for tau in taus]


def _normal(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
