"""Runs that collapsed: seldom, and so far below the others that a mean of few seeds does not know of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from harness.comparison.measures import Measure
from harness.comparison.statistics import CONFIDENCE, Interval, Values, holm, outliers, share_interval
from harness.metrics.formatting import listed, number, plural

_NAMED = 3  # cells in a sentence
_OF_BEST = 0.5  # of the best run: what ends below it collapsed
_LEAST = 0.25  # below the best run, of accuracy
_FAR = 0.15  # from the median, of accuracy: a seed that is nearer is no outlier


@dataclass(frozen=True)
class Collapse:
    """The collapsed runs of a cell. seeds: of those; worst: accuracy of the worst run; share: of the seeds, with
    Wilson's interval; p: that as many more or fewer collapse where nothing differs from the baseline, by Fisher's exact
    test, after Holm's correction."""

    seeds: tuple[int, ...]
    of: int
    worst: float
    share: Interval
    p: float

    @property
    def text(self) -> str:
        """`1 of 5`."""
        return f"{len(self.seeds)} of {self.of}"


def collapsed(values: Values, best: float) -> np.ndarray:
    """bool [n]: whether runs ended below half the accuracy of the best run of a comparison, and .25 below it."""
    return np.asarray(values, np.float64) < min(_OF_BEST * best, best - _LEAST)


def odd_ones(values: Values) -> list[int]:
    """Indices of runs that ended far from the others: ten robust standard deviations and .15 from the median; of four
    runs or more."""
    return outliers(values, least=_FAR / max(float(np.median(values)), 1e-9))


def collapses_of(outcome: Measure, baseline: int) -> tuple[Collapse, ...]:
    """Collapsed runs of each cell. outcome: what was learnt, a share."""
    best = max(value for cell in outcome.cells for value in cell.per_seed.values())
    seeds, counts = [], []
    for cell in outcome.cells:
        found = collapsed(list(cell.per_seed.values()), best)
        seeds.append(tuple(seed for seed, it in zip(cell.per_seed, found, strict=True) if it))
        counts.append((int(found.sum()), int((~found).sum())))
    others = [index for index in range(len(counts)) if index != baseline]
    tests = [float(stats.fisher_exact([counts[index], counts[baseline]]).pvalue) for index in others]
    p = dict(zip(others, holm(tests), strict=True))
    return tuple(
        Collapse(those, sum(both), min(cell.per_seed.values()), share_interval(both[0], sum(both)), p.get(index, 1.0))
        for index, (cell, those, both) in enumerate(zip(outcome.cells, seeds, counts, strict=True))
    )


def collapse_sentence(labels: Sequence[str], collapses: Sequence[Collapse], baseline: int) -> str:
    """The verdict that holds where runs collapse: on the share of the seeds that did. Empty where none did."""
    if not any(collapse.seeds for collapse in collapses):
        return ""
    parts = []
    for index, (label, collapse) in enumerate(zip(labels, collapses, strict=True)):
        if index != baseline and (collapse.seeds or collapses[baseline].seeds):
            tells = "tells" if collapse.p < 1 - CONFIDENCE else "does not tell"
            parts.append(f"{collapse.text} of {label} (exact test: p {number(collapse.p)}, which {tells} them apart)")
    more = [f"and of {plural(len(parts) - _NAMED, 'more cell')}"] if len(parts) > _NAMED else []
    told = ", ".join([f"{collapses[baseline].text} of {labels[baseline]}", *parts[:_NAMED], *more])
    return f"Runs collapsed: {told}."


def collapse_warnings(labels: Sequence[str], outcome: Measure, collapses: Sequence[Collapse]) -> Iterator[str]:
    """Cells of which a mean says too little: some seeds collapsed, or one is far from the others."""
    for label, cell, collapse in zip(labels, outcome.cells, collapses, strict=True):
        values, seeds = list(cell.per_seed.values()), list(cell.per_seed)
        odd = [seeds[index] for index in odd_ones(values)]
        if 0 < len(collapse.seeds) < collapse.of:
            which = f"{listed('seed', collapse.seeds)}, down to {number(collapse.worst)}"
            what = f"{collapse.text} seeds collapsed ({which})"
        elif odd:
            what = f"{listed('seed', odd)} ended far from the others"
        else:
            continue
        yield (
            f"{label}: {what}: the interval of its mean holds the true one in half of such cases only; go by the "
            "paired difference and the share of collapsed seeds, and add seeds (docs/statistics.md)"
        )
