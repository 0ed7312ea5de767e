"""What a comparison is made of: cells, measures of them, curves, histograms and profiles. Data only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.comparison.runs import Run
from harness.comparison.statistics.differences import Difference
from harness.comparison.statistics.estimates import Interval

Better = Literal["higher", "lower"]
Axis = Literal["samples", "tokens", "seconds"]
"""What curves are drawn against: samples trained, their prompt and response tokens, the run's clock."""


@dataclass(frozen=True)
class Cell:
    """One configuration and its runs, one per seed. name: of its folder; label: what tells it from the other cells."""

    name: str
    label: str
    runs: tuple[Run, ...]  # by seed

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.identity.seed for run in self.runs)


@dataclass(frozen=True)
class CellMeasure:
    """One measure of one cell.

    per_seed: a value per seed; infinite where a seed never got there. interval: of the mean over seeds, None where a
    value is infinite (there is no mean then); its bounds are infinite where there is one seed. iqm: interquartile mean
    with a bootstrap interval, None likewise and below four seeds.
    difference: ours - the baseline's, by seed; ratio: ours / the baseline's, None where a value is not positive; both
    are `distinguishable` only where Holm's correction of their family of measures and cells leaves them so.
    better: probability that a run of this cell is better than one of the baseline. All three are None for the baseline
    itself, and where they cannot be had.
    """

    per_seed: Mapping[int, float]
    interval: Interval | None = None
    iqm: Interval | None = None
    difference: Difference | None = None
    ratio: Difference | None = None
    better: Interval | None = None

    @property
    def reached(self) -> int:
        """Seeds whose value is finite."""
        return sum(math.isfinite(value) for value in self.per_seed.values())

    @property
    def value(self) -> float:
        """The mean over seeds; the median where a seed never got there: infinite if half of them or more did not."""
        values = np.array(list(self.per_seed.values()))
        return float(np.mean(values) if np.isfinite(values).all() else np.median(values))


@dataclass(frozen=True)
class Measure:
    """A figure that every cell has.

    key: the metric it comes from, as in `throughput/samples_per_s`; `reach/samples/0.8` and `reach/seconds/0.8` are
    what it takes to reach that exact match. better: None where neither is. compared: which of difference and ratio is
    what people say of it.
    """

    key: str
    title: str
    unit: str
    better: Better | None
    compared: Literal["difference", "ratio"]
    cells: tuple[CellMeasure, ...]  # in the order of the comparison's cells

    def against_baseline(self, cell: int) -> Difference | None:
        """The cell's ratio to the baseline, or its difference, as `compared` says; None where it has none."""
        return self.cells[cell].ratio if self.compared == "ratio" else self.cells[cell].difference


@dataclass(frozen=True)
class Curve:
    """A metric of one cell against an axis, the running mean of each seed on a grid that all its seeds cover.

    cell: index. grid, mean, low, high: float64 [points]; low and high: interval of the mean at each point by itself,
    NaN where there is one seed. per_seed: float64 [points] each. window: iterations that the running mean spans.
    """

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
    """Share of a cell's trained samples by worst lag. lags: int64 [0 .. largest of all cells]; shares: mean over seeds;
    per_seed: likewise."""

    lags: np.ndarray
    shares: np.ndarray
    per_seed: Mapping[int, np.ndarray]


@dataclass(frozen=True)
class Profile:
    """Performance profile of one cell: for each score tau, the share of its seeds that end above it, with an interval.

    taus, shares, low, high: float64 [points].
    """

    taus: np.ndarray
    shares: np.ndarray
    low: np.ndarray
    high: np.ndarray
