"""Figures of runs as measures of cells: every seed, intervals, and what each cell is against the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from harness.comparison.figures import EXACT_MATCH, SPEED, Figure, figures_of
from harness.comparison.parts import Cell, CellMeasure, Measure
from harness.comparison.statistics.differences import (
    Difference,
    PerSeed,
    corrected,
    group_difference,
    group_ratio,
    paired_difference,
    paired_ratio,
)
from harness.comparison.statistics.estimates import Interval, iqm_interval, mean_interval, probability_of_improvement

_LEAST_FOR_IQM = 4


HEADLINES = (SPEED, EXACT_MATCH)
"""The two questions of a comparison. The differences of each are a family of their own; all others are one together, so
that the more is measured, the more it takes to call any of it a difference."""


def measures_of(cells: Sequence[Cell], baseline: int) -> tuple[Measure, ...]:
    """Every figure that all these runs give, against the cell of index `baseline`; what is called a difference is so
    after Holm's correction of its family."""
    runs = [run for cell in cells for run in cell.runs]
    measures = [_measure(figure, cells, baseline) for figure in figures_of(runs)]
    headlines = [index for index, measure in enumerate(measures) if measure.key in HEADLINES]
    rest = [index for index in range(len(measures)) if index not in headlines]
    for family in [*([index] for index in headlines), rest]:
        called = iter(_call([measures[index] for index in family]))
        for index in family:
            measures[index] = next(called)
    return tuple(measures)


def _measure(figure: Figure, cells: Sequence[Cell], baseline: int) -> Measure:
    values = [{run.identity.seed: figure.of(run) for run in cell.runs} for cell in cells]
    theirs = values[baseline]
    measured = [
        _alone(figure, ours) if index == baseline else _against(figure, ours, theirs)
        for index, ours in enumerate(values)
    ]
    return Measure(figure.key, figure.title, figure.unit, figure.better, figure.compared, tuple(measured))


def _call(family: Sequence[Measure]) -> list[Measure]:
    """These measures, with what Holm leaves of their differences; a ratio is called what its difference is."""
    places = [(m, c) for m, measure in enumerate(family) for c in range(len(measure.cells))]
    compared = {(m, c): its for m, c in places if (its := family[m].against_baseline(c)) is not None}
    called = {
        place: its.distinguishable for place, its in zip(compared, corrected(list(compared.values())), strict=True)
    }
    return [
        replace(measure, cells=tuple(_said(its, called.get((m, c), False)) for c, its in enumerate(measure.cells)))
        for m, measure in enumerate(family)
    ]


def _said(its: CellMeasure, called: bool) -> CellMeasure:
    difference, ratio = (
        each and replace(each, distinguishable=each.distinguishable and called) for each in (its.difference, its.ratio)
    )
    return replace(its, difference=difference, ratio=ratio)


def _against(figure: Figure, ours: PerSeed, theirs: PerSeed) -> CellMeasure:
    return replace(
        _alone(figure, ours),
        difference=_difference(ours, theirs),
        ratio=_ratio(ours, theirs),
        better=_better(figure, ours, theirs),
    )


def _alone(figure: Figure, values: PerSeed) -> CellMeasure:
    listed = list(values.values())
    if not np.isfinite(listed).all():
        return CellMeasure(values)
    iqm = iqm_interval([listed]) if len(listed) >= _LEAST_FOR_IQM else None
    return CellMeasure(values, mean_interval(listed).within(*figure.range), iqm)


def _difference(ours: PerSeed, theirs: PerSeed) -> Difference | None:
    return _compared(ours, theirs, paired_difference, group_difference)


def _ratio(ours: PerSeed, theirs: PerSeed) -> Difference | None:
    if min(*ours.values(), *theirs.values()) <= 0:
        return None
    return _compared(ours, theirs, paired_ratio, group_ratio)


def _compared(
    ours: PerSeed,
    theirs: PerSeed,
    pairs: Callable[[PerSeed, PerSeed], Difference],
    groups: Callable[[Sequence[float], Sequence[float]], Difference],
) -> Difference | None:
    """By seed where they share any. None where a seed never got there: an infinity has no difference."""
    if not np.isfinite([*ours.values(), *theirs.values()]).all():
        return None
    if ours.keys() & theirs.keys():
        return pairs(ours, theirs)
    return groups(list(ours.values()), list(theirs.values()))


def _better(figure: Figure, ours: PerSeed, theirs: PerSeed) -> Interval | None:
    if figure.better is None:
        return None
    sides = [np.array(list(side.values())) for side in (ours, theirs)]
    return probability_of_improvement(*(sides if figure.better == "higher" else reversed(sides)))
