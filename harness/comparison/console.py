"""A comparison on the terminal: the verdict, tables with every seed, and what to mind under them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from harness.comparison.figures import EXACT_MATCH, SPEED
from harness.comparison.parts import CellMeasure, Measure
from harness.comparison.result import Comparison
from harness.comparison.statistics.differences import Difference
from harness.comparison.statistics.estimates import Interval
from harness.metrics.manifest import HOW_TIMED

_IN_FULL = (SPEED, EXACT_MATCH)
_ON_THE_WAY = "reach/"
_LAGS = ("staleness/mean", "staleness/max", "time/weight_sync_exposed_s")
_BOUND = "throughput/fraction_of_bound"
_SHORT_TITLES = {
    _BOUND: "of bound",
    "time/weight_sync_exposed_s": "weight sync\nexposed, s",
    "staleness/mean": "mean lag",
    "staleness/max": "largest lag",
}
_IDLE = "idle/"
_WIDTH = 100
_LABEL = 26
_LEAST_LABEL = 14  # holds the name of a schedule

NOTES = (
    "mean over seeds, with its 95 % t interval; ratios and differences are paired by seed where seeds are shared",
    "* called a difference: its interval excludes none, and so does Holm's correction for several cells",
    "better: probability that a run of this cell is better than one of the baseline, with its 95 % interval",
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print it, at most 100 columns wide."""
    _line(console, comparison.verdict, style="bold")
    console.print()
    for key in _IN_FULL:
        measure = comparison.measure(key)
        if measure is not None:
            console.print(_in_full(comparison, measure), width=_WIDTH)
    reached = [measure for measure in comparison.measures if measure.key.startswith(f"{_ON_THE_WAY}samples/")]
    if reached:
        console.print(_on_the_way(comparison, reached), width=_WIDTH)
    for table in _in_short(comparison):
        console.print(table, width=_WIDTH)
    for note in NOTES if len(comparison.cells) > 1 else NOTES[:1]:
        _line(console, note, style="dim")
    if (gate := comparison.gate) is not None:
        for told in gate.told():
            _line(console, told, style="" if gate.passed else "bold red")
    if (kept := comparison.conservation) is not None:
        for told in (kept.told(), *kept.problems):
            _line(console, told, style="" if kept.passed else "bold red")
    for warning in comparison.warnings:
        _line(console, f"Warning: {warning}", style="yellow")


def _in_full(comparison: Comparison, measure: Measure) -> Table:
    """Every seed, the mean with its interval, and what it is against the baseline."""
    table = _table(comparison, measure.title.capitalize())
    table.add_column("mean", justify="right", no_wrap=True)
    if len(comparison.cells) > 1:
        table.add_column("against baseline", justify="right", no_wrap=True)
        table.add_column("better", justify="right", no_wrap=True)
    table.add_column("by seed", overflow="fold")
    for index, (label, its) in enumerate(zip(_labels(comparison), measure.cells, strict=True)):
        row = [label, _mean(its)]
        if len(comparison.cells) > 1:
            row += [_against(measure, measure.against_baseline(index)), _better(its.better)]
        table.add_row(*row, " ".join(number(value) for value in its.per_seed.values()))
    return table


def _on_the_way(comparison: Comparison, measures: Sequence[Measure]) -> Table:
    """Samples and seconds to each exact match, means over seeds, or how many seeds got there. Intervals are in the
    report: five columns of them need a wider page."""
    table = _table(comparison, "Samples and seconds to reach an exact match")
    for measure in measures:
        table.add_column(measure.key.rpartition("/")[2], justify="right", no_wrap=True)
    for index, label in enumerate(_labels(comparison)):
        row = []
        for measure in measures:
            samples = measure.cells[index]
            timed = comparison.measure(measure.key.replace("samples", "seconds"))
            assert timed is not None
            row.append(_reached(samples, timed.cells[index]))
        table.add_row(label, *row)
    return table


def _in_short(comparison: Comparison) -> list[Table]:
    """Means, and below them the smallest and the largest of the seeds: of lags, and of devices."""
    lags = [measure for key in _LAGS if (measure := comparison.measure(key)) is not None]
    devices = [measure for key in (_BOUND,) if (measure := comparison.measure(key)) is not None]
    devices += _different([measure for measure in comparison.measures if measure.key.startswith(_IDLE)])
    return [_means(comparison, "Lag", lags), _means(comparison, "Devices", devices)]


def _means(comparison: Comparison, title: str, measures: Sequence[Measure]) -> Table:
    table = _table(comparison, title)
    for measure in measures:
        head = _SHORT_TITLES.get(measure.key) or measure.key.replace(_IDLE, "idle\n")
        table.add_column(head, justify="right", no_wrap=True)
    for index, label in enumerate(_labels(comparison)):
        table.add_row(label, *(_range(measure.cells[index], measure.unit) for measure in measures))
    return table


def _different(measures: Sequence[Measure]) -> list[Measure]:
    """Without those that say the same as one before: roles on the same devices are idle together."""
    by_values = {str([dict(its.per_seed) for its in measure.cells]): measure for measure in reversed(measures)}
    return list(reversed(by_values.values()))


def _table(comparison: Comparison, title: str) -> Table:
    """Names of schedules stay whole; longer labels are folded."""
    told = f"{title}{_simulated(comparison)}"
    table = Table(title=told, box=box.SIMPLE_HEAD, show_lines=True, title_justify="left", pad_edge=False)
    longest = max(len(cell.label) for cell in comparison.cells)
    table.add_column("", overflow="fold", min_width=min(longest, _LEAST_LABEL), max_width=_LABEL)
    return table


def _labels(comparison: Comparison) -> list[str]:
    marks = ["\n(baseline)" if index == comparison.baseline else "" for index in range(len(comparison.cells))]
    several = len(comparison.cells) > 1
    return [cell.label + mark * several for cell, mark in zip(comparison.cells, marks, strict=True)]


def _simulated(comparison: Comparison) -> str:
    backend = comparison.cells[0].runs[0].identity.backend
    return "" if backend == "real" else f" ({HOW_TIMED[backend]})"


def number(value: float) -> str:
    """Short: three places below ten, four digits above, whole numbers from a thousand on."""
    if math.isinf(value):
        return "never"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"


def _mean(its: CellMeasure) -> str:
    if its.interval is None or not its.interval.bounded:
        return number(its.value)
    return f"{number(its.value)}\n{number(its.interval.low)} to {number(its.interval.high)}"


def _against(measure: Measure, compared: Difference | None) -> str:
    if compared is None:
        return "-"
    ratio, interval = measure.compared == "ratio", compared.interval
    value = f"{interval.value:.2f}x" if ratio else f"{interval.value:+.3f}"
    value = f"{value} {'*' if compared.distinguishable else ' '}"
    if not interval.bounded:
        return value
    low, high = (f"{bound:.2f}" if ratio else f"{bound:+.3f}" for bound in (interval.low, interval.high))
    return f"{value}\n{low} to {high}"


def _better(better: Interval | None) -> str:
    return "-" if better is None else f"{better.value:.2f}\n{better.low:.2f} to {better.high:.2f}"


def _reached(samples: CellMeasure, seconds: CellMeasure) -> str:
    runs = len(samples.per_seed)
    if samples.reached < runs:
        return f"{samples.reached} of {runs}\nseeds"
    return f"{number(samples.value)}\n{number(seconds.value)} s"


def _range(its: CellMeasure, unit: str) -> str:
    """unit: a share, shown in per cent, has none."""
    low, high = min(its.per_seed.values()), max(its.per_seed.values())
    if unit:
        return number(its.value) if low == high else f"{number(its.value)}\n{number(low)}-{number(high)}"
    shares = f"{100 * low:.0f}-{100 * high:.0f}"
    return f"{its.value:.0%}" + (f"\n{shares} %" if f"{100 * low:.0f}" != f"{100 * high:.0f}" else "")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, width=min(_WIDTH, console.width), highlight=False, markup=False)
