"""Interquartile mean with a stratified bootstrap interval (Agarwal et al., "Deep Reinforcement Learning at the Edge of
the Statistical Precipice", NeurIPS 2021, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.comparison.statistics.interval import Interval

_DRAWS = 10_000


def iqm(values: Sequence[float] | np.ndarray) -> float:
    """The mean of the middle half: floor(n / 4) values are cut off at each end. The mean, with fewer than four."""
    return float(_middle_mean(np.asarray(values, dtype=np.float64).reshape(-1)))


def bootstrap_iqm(
    scores: Sequence[Sequence[float]] | np.ndarray, *, confidence: float = 0.95, draws: int = _DRAWS, seed: int = 0
) -> Interval:
    """IQM of all scores, and the percentiles of its bootstrap.

    scores: [strata][seeds], where a stratum is a task or whatever else was run repeatedly; each draw resamples seeds
    within every stratum. Few seeds make this interval too narrow: docs/statistics.md says by how much.
    """
    rng = np.random.default_rng(seed)
    strata = [np.asarray(stratum, dtype=np.float64) for stratum in scores]
    resampled = [stratum[rng.integers(0, stratum.size, (draws, stratum.size))] for stratum in strata]
    drawn = _middle_mean(np.concatenate(resampled, axis=1))
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(iqm(np.concatenate(strata)), float(low), float(high), confidence)


def _middle_mean(values: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    count = values.shape[-1]
    if not count:
        raise ValueError("no value: there is nothing to take a mean of")
    cut = count // 4
    return np.sort(values, axis=-1)[..., cut : count - cut].mean(axis=-1)
