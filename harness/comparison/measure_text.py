"""Measures of cells in words, the same for terminal, page and Markdown: values, intervals, against the baseline."""

import math
from dataclasses import dataclass

from harness.comparison.comparison import Comparison
from harness.comparison.measures import EXACT_MATCH, GOOD, SPEED, CellMeasure, Measure
from harness.comparison.statistics import Interval
from harness.metrics.formatting import decimals, number, percent, signed

_SHARES = ("idle/", "eval/", EXACT_MATCH, GOOD, "ledger/", "selection/tokens", "throughput/fraction_of_bound")
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
        """A value in words."""
        return number(value * self.factor, self.digits)

    def step(self, value: float) -> str:
        """A difference in words."""
        return signed(value * self.factor, self.digits)

    def bounds(self, interval: Interval | None) -> str:
        """An interval's bounds in words."""
        return bounds(interval, self.digits, self.factor)

    def seeds(self, cell: CellMeasure) -> str:
        """The value of every seed, in the order of the seeds."""
        return ", ".join(self.value(value) for value in cell.per_seed.values())


@dataclass(frozen=True)
class Against:
    """A cell against the baseline, in words. verdict: `better`, `worse`, `differs` (neither is better), `equal`, `same`
    (nothing tells it from it) or `open`, where nothing may be said; word: the same to be read."""

    figure: str
    unit: str
    bounds: str
    verdict: str
    margin: str

    @property
    def called(self) -> bool:
        """Whether it is called a difference."""
        return self.verdict in ("better", "worse", "differs")

    @property
    def sign(self) -> str:
        """A star for what is called a difference, `=` for what is called equal, `?` for what is not judged."""
        return "*" if self.called else {"equal": "=", "open": "?"}.get(self.verdict, "")

    @property
    def word(self) -> str:
        """The verdict as it is written."""
        named = {"same": "not told apart", "equal": f"equal within {self.margin}", "open": "not judged"}
        return named.get(self.verdict, self.verdict)

    @property
    def value(self) -> str:
        """`1.35x`, or `+0.7 points`."""
        return f"{self.figure}{self.unit}"


def bounds(interval: Interval | None, digits: int, factor: float = 1.0) -> str:
    """[low, high], or why there are none."""
    if interval is None:
        return "no interval"
    if not interval.bounded:
        return "one seed"
    return f"[{number(factor * interval.low, digits)}, {number(factor * interval.high, digits)}]"


def unit_of(measure: Measure) -> str:
    """Unit of a measure's values, where its title does not say it already."""
    return "" if "per second" in measure.title else scale_of(measure).unit


def titled(measure: Measure) -> str:
    """A measure's title, with the unit."""
    unit = unit_of(measure)
    return f"{measure.title} ({unit})" if unit else measure.title


def scale_of(measure: Measure) -> Scale:
    """The scale of a measure, by what it is and how large its values are."""
    share = measure.key.startswith(_SHARES)
    factor = 100.0 if share else 1.0
    values = [value * factor for cell in measure.cells for value in cell.per_seed.values()]
    unit = "%" if share else measure.unit
    digits = min(decimals(values), 1) if share else decimals(values)
    if all(not math.isfinite(value) or value == round(value) for value in values) and measure.unit != "s":
        digits = min(digits, 2) if len(values) > 1 and _means_differ(measure) else 0
    return Scale(factor, unit, "points" if share else measure.unit, digits)


def against(measure: Measure, cell: int) -> Against | None:
    """None for the baseline, and where one of the two has no mean."""
    difference = measure.against_baseline(cell)
    if difference is None:
        return None
    scale, interval = scale_of(measure), difference.interval
    if measure.compared == "ratio":
        figure, unit, within = number(interval.value, 2), "x", bounds(interval, 2)
    else:
        figure, unit, within = scale.step(interval.value), f" {scale.step_unit}".rstrip(), scale.bounds(interval)
    if not difference.distinguishable:
        verdict = "open" if not difference.judged else "equal" if difference.equal else "same"
    elif measure.better is None:
        verdict = "differs"
    else:
        verdict = "better" if (interval.value > difference.none) == (measure.better == "higher") else "worse"
    return Against(figure, unit, within, verdict, measure.margin_text)


def headlines(comparison: Comparison) -> list[Measure]:
    """The few measures that answer most questions; of thresholds the highest that the most cells reach."""
    found = []
    outcome = comparison.outcome
    learnt = () if outcome is None else (outcome.key, "eval/greedy")
    for key in dict.fromkeys((SPEED, *learnt, "reach/seconds/", "staleness/mean", *_MORE_HEADLINES)):
        measures = [m for m in comparison.measures if m.key == key or (key.endswith("/") and m.key.startswith(key))]
        if measures:
            reached = [sum(cell.reached for cell in measure.cells) for measure in measures]
            found.append(max(zip(reached, range(len(measures)), measures, strict=True), key=lambda it: it[:2])[2])
    return found[:_MOST_HEADLINES]


def beside_mean(comparison: Comparison, measure: Measure, cell: int) -> str:
    """Words beside a cell's mean: `others' load 12 %` of a rate that was measured; `worst 31.0, 1 of 5 seeds
    collapsed [4, 62] %` of what was learnt; else empty."""
    others = comparison.cells[cell].others_load
    if measure.key.startswith("throughput/") and measure.compared == "ratio" and others is not None:
        return f"others' load {percent(others)}"
    if measure is not comparison.outcome:
        return ""
    found = comparison.collapses[cell]
    share = bounds(found.share, 0, 100.0)
    return f"worst {scale_of(measure).value(found.worst)}, {found.text} seeds collapsed {share} %"


def _means_differ(measure: Measure) -> bool:
    """Whether a mean of whole numbers is none itself."""
    means = [cell.value for cell in measure.cells if math.isfinite(cell.value)]
    return any(mean != round(mean) for mean in means)


@dataclass(frozen=True)
class MeasureRow:
    """A cell's row in the table of a measure, in words. iqm, better: value and bounds of the interquartile mean, and of
    the probability that it is better than the baseline; None where there is none."""

    label: str
    is_baseline: bool
    value: str
    bounds: str
    beside: str
    iqm: tuple[str, str] | None
    against: Against | None
    better: tuple[str, str] | None
    seeds: str


def rows_of(comparison: Comparison, measure: Measure) -> list[MeasureRow]:
    """A row for each cell, in their order."""
    scale = scale_of(measure)
    return [
        MeasureRow(
            label=cell.label,
            is_baseline=index == comparison.baseline,
            value=scale.value(of.value),
            bounds=scale.bounds(of.interval),
            beside=beside_mean(comparison, measure, index),
            iqm=(scale.value(of.iqm.value), scale.bounds(of.iqm)) if of.iqm else None,
            against=against(measure, index),
            better=(number(of.better.value, 2), bounds(of.better, 2)) if of.better else None,
            seeds=scale.seeds(of),
        )
        for index, (cell, of) in enumerate(zip(comparison.cells, measure.cells, strict=True))
    ]
