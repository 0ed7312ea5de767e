"""Curves of a comparison: learning curves, histograms of staleness, performance profiles, time of devices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.comparison.measures import (
    EXACT_MATCH,
    HELD_OUT,
    Measure,
    column,
    custom_metrics,
    evaluations_along,
    held_out,
    in_every_iteration,
    rewarded,
    seconds,
    smoothing,
    tokens,
    trained,
)
from harness.comparison.runs import Cell, Run
from harness.comparison.statistics import performance_profile, running_mean, t_bounds
from harness.metrics.timeline import Timeline

Axis = Literal["samples", "tokens", "seconds"]
"""Axes of curves: samples trained, their prompt and response tokens, the run's clock."""

REWARDS = (EXACT_MATCH, "reward/mean")
LEARNING = (*HELD_OUT, *REWARDS)  # curves of what is learnt, the most wanted first
OFF_POLICY = ("policy/kl_behaviour", "policy/effective_samples", "policy/left_out")
_AXES: tuple[Axis, ...] = ("samples", "tokens", "seconds")
_POINTS = 200
_MOST_BARS = 10
_TAUS = 1001


@dataclass(frozen=True)
class Curve:
    """A metric of one cell against an axis, the running mean of each seed on a grid that all its seeds cover. cell:
    index. grid, mean, low, high: float64 [points]; low and high: interval of the mean at each point by itself, NaN
    where there is one seed. per_seed: float64 [points] each. window: iterations that the running mean spans."""

    cell: int
    key: str
    axis: Axis
    grid: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    per_seed: Mapping[int, np.ndarray]
    window: int


@dataclass(frozen=True)
class StalenessHistogram:
    """Shares of a cell's trained samples by worst lag, means over seeds. lags: int64 [0 .. largest of all cells]."""

    lags: np.ndarray
    shares: np.ndarray

    def grouped(self) -> tuple[list[float], list[str]]:
        """Shares, and the names of their lags, for as many bars as fit: the largest lags share the last one."""
        lags, shares = [str(lag) for lag in self.lags.tolist()], self.shares.tolist()
        if len(lags) <= _MOST_BARS:
            return shares, lags
        kept = _MOST_BARS - 1
        return [*shares[:kept], sum(shares[kept:])], [*lags[:kept], f"{kept}+"]


@dataclass(frozen=True)
class PerformanceProfile:
    """The share of a cell's seeds above each score tau, with an interval. taus, shares, low, high: float64 [points]."""

    taus: np.ndarray
    shares: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class RoleTime:
    """How the devices of a role spent the time after warm-up: own work, work of other roles on the same devices, idle.
    Shares, means over the role's devices and over seeds; idle also by seed."""

    role: str
    own: float
    others: float
    idle: float
    idle_by_seed: tuple[float, ...]


def curves_of(cells: Sequence[Cell]) -> tuple[Curve, ...]:
    """Curves of every cell against every axis: rewards where there are any, response length, and what every iteration
    has of how far training is off policy, and of extra values of scores."""
    runs = [run for cell in cells for run in cell.runs]
    extra = [key for key in (*OFF_POLICY, *custom_metrics(runs)) if in_every_iteration(runs, key)]
    keys = [*(REWARDS if rewarded(runs) else ()), "response_length/mean", *extra]
    drawn = [_curve(index, cell, key, axis) for key in keys for axis in _AXES for index, cell in enumerate(cells)]
    drawn += [
        _held_out(index, cell, key, axis)
        for key in held_out(runs)
        for axis in _AXES
        for index, cell in enumerate(cells)
    ]
    return tuple(drawn)


def _held_out(index: int, cell: Cell, key: str, axis: Axis) -> Curve:
    """The curve between versions that were evaluated, on straight lines."""
    drawn = {run.identity.seed: evaluations_along(run, key, _along(run, axis)) for run in cell.runs}
    return _over_seeds(index, key, axis, drawn, window=1, points=_POINTS)


def _curve(index: int, cell: Cell, key: str, axis: Axis) -> Curve:
    window = smoothing(cell.runs[0])
    drawn = {run.identity.seed: (_along(run, axis), running_mean(column(run, key), window)) for run in cell.runs}
    points = min(_POINTS, len(cell.runs[0].metrics) - window + 1)
    return _over_seeds(index, key, axis, drawn, window, points)


def _over_seeds(
    index: int, key: str, axis: Axis, drawn: Mapping[int, tuple[np.ndarray, np.ndarray]], window: int, points: int
) -> Curve:
    """drawn: by seed, x and y; the first `window - 1` are left out."""
    start = max(x[window - 1] for x, _ in drawn.values())
    end = min(x[-1] for x, _ in drawn.values())
    grid = np.linspace(start, max(start, end), points)
    per_seed = {seed: np.interp(grid, x[window - 1 :], y[window - 1 :]) for seed, (x, y) in drawn.items()}
    mean, low, high = t_bounds(np.stack(list(per_seed.values()), axis=-1))
    if key == EXACT_MATCH or key in HELD_OUT:
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
    lags = [[trained(run, "lag_worst").astype(np.int64) for run in cell.runs] for cell in cells]
    bars = 1 + max(int(run.max()) for runs in lags for run in runs)
    shares = ([np.bincount(run, minlength=bars) / run.size for run in runs] for runs in lags)
    return tuple(StalenessHistogram(np.arange(bars), np.mean(per_seed, axis=0)) for per_seed in shares)


def profiles_of(outcome: Measure | None) -> tuple[PerformanceProfile, ...]:
    """One profile of what was learnt per cell, over scores from 0 to 1; none where nothing was rewarded."""
    if outcome is None:
        return ()
    taus = np.linspace(0.0, 1.0, _TAUS)
    return tuple(
        PerformanceProfile(taus, *performance_profile(list(cell.per_seed.values()), taus)) for cell in outcome.cells
    )


def role_times(timelines: Sequence[Timeline]) -> list[RoleTime]:
    """One per role of these runs, one for each seed, in the order of their placement."""
    times = []
    for role in timelines[0].roles:
        idle = np.array([timeline.idle(role) for timeline in timelines])
        own = np.array([_own_share(timeline, role) for timeline in timelines])
        others = np.clip(1 - idle - own, 0, None)
        times.append(RoleTime(role, float(own.mean()), float(others.mean()), float(idle.mean()), tuple(idle.tolist())))
    return times


def _own_share(timeline: Timeline, role: str) -> float:
    start, end = timeline.steady_window()
    return timeline.busy_seconds(role) / (end - start)
