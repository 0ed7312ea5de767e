"""What is drawn of a comparison: learning curves, histograms of staleness, performance profiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.comparison.figures import EXACT_MATCH, at_end, column, rewarded, seconds, smoothing, tokens, trained
from harness.comparison.parts import Axis, Cell, Curve, Profile, StalenessHistogram
from harness.comparison.runs import Run
from harness.comparison.statistics.estimates import performance_profile, t_bounds
from harness.comparison.statistics.series import running_mean

_REWARDS = (EXACT_MATCH, "reward/mean")
_ALWAYS = ("response_length/mean",)
_AXES: tuple[Axis, ...] = ("samples", "tokens", "seconds")
_POINTS = 200
_TAUS = 1001


def curves_of(cells: Sequence[Cell]) -> tuple[Curve, ...]:
    """Rewards, where there are any, and response length, of every cell against every axis."""
    keys = (*_REWARDS, *_ALWAYS) if rewarded([run for cell in cells for run in cell.runs]) else _ALWAYS
    return tuple(_curve(index, cell, key, axis) for key in keys for axis in _AXES for index, cell in enumerate(cells))


def _curve(index: int, cell: Cell, key: str, axis: Axis) -> Curve:
    window = smoothing(cell.runs[0])
    drawn = {run.identity.seed: (_along(run, axis), running_mean(column(run, key), window)) for run in cell.runs}
    start = max(x[window - 1] for x, _ in drawn.values())
    end = min(x[-1] for x, _ in drawn.values())
    points = min(_POINTS, len(cell.runs[0].metrics) - window + 1)
    grid = np.linspace(start, max(start, end), points)
    per_seed = {seed: np.interp(grid, x[window - 1 :], y[window - 1 :]) for seed, (x, y) in drawn.items()}
    mean, low, high = t_bounds(np.stack(list(per_seed.values()), axis=-1))
    if key == EXACT_MATCH:
        low, high = np.maximum(low, 0.0), np.minimum(high, 1.0)
    if len(per_seed) == 1:
        low = high = np.full_like(mean, math.nan)
    return Curve(index, key, axis, grid, mean, low, high, per_seed, window)


def _along(run: Run, axis: Axis) -> np.ndarray:
    """float64 [iterations], where each iteration ends on the axis."""
    if axis == "tokens":
        return np.cumsum(tokens(run))
    return seconds(run) if axis == "seconds" else column(run, "samples")


def staleness_of(cells: Sequence[Cell]) -> tuple[StalenessHistogram, ...]:
    """One histogram of worst lags per cell, all over the same lags."""
    lags = [{run.identity.seed: trained(run, "lag_worst").astype(np.int64) for run in cell.runs} for cell in cells]
    largest = max(int(its.max()) for per_seed in lags for its in per_seed.values())
    return tuple(_histogram(per_seed, largest) for per_seed in lags)


def _histogram(lags: dict[int, np.ndarray], largest: int) -> StalenessHistogram:
    shares = {seed: np.bincount(its, minlength=largest + 1) / its.size for seed, its in lags.items()}
    return StalenessHistogram(np.arange(largest + 1), np.mean(list(shares.values()), axis=0), shares)


def profiles_of(cells: Sequence[Cell]) -> tuple[Profile, ...]:
    """One profile of the exact match at the end per cell, over scores from 0 to 1; none where nothing was rewarded."""
    if not rewarded([run for cell in cells for run in cell.runs]):
        return ()
    taus = np.linspace(0.0, 1.0, _TAUS)
    return tuple(_profile([at_end(EXACT_MATCH)(run) for run in cell.runs], taus) for cell in cells)


def _profile(scores: Sequence[float], taus: np.ndarray) -> Profile:
    return Profile(taus, *performance_profile(scores, taus))
