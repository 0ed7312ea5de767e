"""A measure of a cell in words: value, interval, every seed, and what it is against the baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.comparison.parts import CellMeasure, Measure
from harness.comparison.result import Comparison
from harness.comparison.statistics.estimates import Interval
from harness.report.page.numbers import bounds, decimals, figure, signed

_SHARES = ("idle/", "reward/exact_match", "ledger/", "throughput/fraction_of_bound")
_HEADLINES = ("throughput/samples_per_s", "reward/exact_match", "reach/seconds/", "staleness/mean")
_MORE_HEADLINES = ("throughput/fraction_of_bound", "idle/rollout", "idle/actor")
_MOST_HEADLINES = 6


@dataclass(frozen=True)
class Scale:
    """How the values of one measure are written: shares as percent, all with the same digits."""

    factor: float
    unit: str
    step_unit: str
    digits: int

    def value(self, value: float) -> str:
        return figure(value * self.factor, self.digits)

    def step(self, value: float) -> str:
        return signed(value * self.factor, self.digits)

    def bounds(self, interval: Interval | None) -> str:
        return bounds(self.scaled(interval), self.digits)

    def scaled(self, interval: Interval | None) -> Interval | None:
        if interval is None:
            return None
        value, low, high = (part * self.factor for part in (interval.value, interval.low, interval.high))
        return Interval(value, low, high, interval.confidence)


@dataclass(frozen=True)
class Against:
    """A cell against the baseline. verdict: `better`, `worse`, `differs`, or `same` if it cannot be told from it."""

    value: str
    bounds: str
    verdict: str


def scale_of(measure: Measure) -> Scale:
    """By what the measure is, and how large its values are."""
    share = measure.key.startswith(_SHARES)
    factor = 100.0 if share else 1.0
    values = [value * factor for cell in measure.cells for value in cell.per_seed.values()]
    unit = "%" if share else measure.unit
    digits = min(decimals(values), 1) if share else decimals(values)
    if all(not math.isfinite(value) or value == round(value) for value in values) and measure.unit != "s":
        digits = max(0, min(digits, 2)) if len(values) > 1 and _means_differ(measure) else 0
    return Scale(factor, unit, "points" if share else measure.unit, digits)


def against(comparison: Comparison, measure: Measure, cell: int) -> Against | None:
    """None for the baseline, and where one of the two has no mean."""
    difference = measure.against_baseline(cell)
    if difference is None or cell == comparison.baseline:
        return None
    scale, interval = scale_of(measure), difference.interval
    if measure.compared == "ratio":
        value, told = f"{figure(interval.value, 2)}x", bounds(interval, 2)
    else:
        value, told = f"{scale.step(interval.value)} {scale.step_unit}".strip(), scale.bounds(interval)
    if not difference.distinguishable:
        verdict = "same"
    elif measure.better is None:
        verdict = "differs"
    else:
        verdict = "better" if (interval.value > difference.none) == (measure.better == "higher") else "worse"
    return Against(value, told, verdict)


def headlines(comparison: Comparison) -> list[Measure]:
    """The few measures that answer most questions; of thresholds the highest that the most cells reach."""
    found = []
    for wanted in (*_HEADLINES, *_MORE_HEADLINES):
        its = [m for m in comparison.measures if m.key == wanted or (wanted.endswith("/") and m.key.startswith(wanted))]
        if its:
            found.append(max(enumerate(its), key=lambda numbered: (_reached(numbered[1]), numbered[0]))[1])
    return found[:_MOST_HEADLINES]


def seeds_told(cell: CellMeasure, scale: Scale) -> str:
    """The value of every seed, in the order of the seeds."""
    return ", ".join(scale.value(value) for value in cell.per_seed.values())


def _reached(measure: Measure) -> int:
    return sum(cell.reached for cell in measure.cells)


def _means_differ(measure: Measure) -> bool:
    """Whether a mean of whole numbers is none itself."""
    means = [cell.value for cell in measure.cells if math.isfinite(cell.value)]
    return any(mean != round(mean) for mean in means)
