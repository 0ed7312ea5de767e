"""A comparison on the terminal: the verdict, tables with every seed, and warnings under them."""

from collections.abc import Sequence

from rich.console import Console

from harness.comparison.comparison import Comparison
from harness.comparison.measure_text import Against, Scale, rows_of, scale_of
from harness.comparison.measures import HELD_OUT, SPEED, CellMeasure, Measure
from harness.metrics.manifest import HOW_TIMED
from harness.metrics.tables import Table

_LAGS = ("staleness/mean", "staleness/max", "time/weight_sync_exposed_s")
_BOUND = "throughput/fraction_of_bound"
_SHORT_TITLES = {
    _BOUND: "of ideal",
    "time/weight_sync_exposed_s": "weight sync exposed, s",
    "staleness/mean": "mean lag",
    "staleness/max": "largest lag",
}
_IDLE = "idle/"

_MEANS = "mean over seeds, with its 95 % t interval; ratios and differences are paired by seed where seeds are shared"
_ONE_SEED = "one seed: no figure has an interval, and no difference is judged"
_SIGNS = (
    "* significant difference: its interval excludes no effect, and so does Holm's correction for several cells; "
    "= equal within {}, by two one-sided tests; no sign: not told apart; ? not judged",
    "better: probability that a run of this cell is better than one of the baseline, with its 95 % interval",
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print it."""
    _line(console, comparison.verdict, style="bold red" if comparison.faults else "bold")
    console.print()
    outcome = comparison.outcome
    for key in dict.fromkeys((SPEED, outcome.key if outcome else None, *HELD_OUT)):
        measure = comparison.measure(key)
        if measure is not None:
            console.print(_in_full(comparison, measure))
    reached = [measure for measure in comparison.measures if measure.key.startswith("reach/samples/")]
    if reached:
        console.print(_thresholds(comparison, reached))
    for table in _in_short(comparison):
        console.print(table)
    notes = [_ONE_SEED if comparison.of_one_seed else _MEANS, *_SIGNS * (len(comparison.cells) > 1)]
    for note in notes:
        _line(console, note.format(comparison.measures[0].margin_text), style="dim")
    if (gate := comparison.gate) is not None:
        for line in gate.summary():
            _line(console, line, style="" if gate.passed else "bold red")
    kept = comparison.conservation
    for line in (kept.summary(), *kept.problems):
        _line(console, line, style="" if kept.passed else "bold red")
    for label, why in comparison.left_out.items():
        _line(console, f"{label} is left out: {why}", style="dim")
    for warning in comparison.warnings:
        _line(console, f"Warning: {warning}", style="yellow")


def _in_full(comparison: Comparison, measure: Measure) -> Table:
    """Every seed, the mean with its interval, and what it is against the baseline."""
    scale, shows_worst, several = scale_of(measure), measure is comparison.outcome, len(comparison.cells) > 1
    found = rows_of(comparison, measure)
    columns = ["mean\n95 %" + ("\nworst, collapsed" if shows_worst else "\nbeside it" if found[0].beside else "")]
    columns += ["against baseline\n95 %", "better\n95 %"] * several
    rows = []
    for index, told in enumerate(found):
        beside = told.beside
        if shows_worst:
            collapse = comparison.collapses[index]
            beside = f"{scale.value(collapse.worst)}, {collapse.text}"
        row = ["\n".join(filter(None, (told.value, told.bounds, beside)))]
        if several:
            row += [_against(told.against), "\n".join(told.better or "-")]
        rows.append([*row, told.seeds.replace(", ", " ")])
    title = measure.title.capitalize() + (f" ({scale.unit})" if scale.unit == "%" else "")
    return _table(comparison, title, [*columns, "by seed"], rows)


def _thresholds(comparison: Comparison, measures: Sequence[Measure]) -> Table:
    """Samples and seconds to each accuracy, means over seeds, or how many seeds got there. Intervals are in the
    report: five columns of them need a wider page."""
    accuracies = [measure.key.rpartition("/")[2] for measure in measures]
    rows: list[list[str]] = [[] for _ in comparison.cells]
    for measure in measures:
        timed = comparison.measure(measure.key.replace("samples", "seconds"))
        assert timed is not None
        for row, samples, seconds in zip(rows, measure.cells, timed.cells, strict=True):
            if samples.reached < (runs := len(samples.per_seed)):
                row.append(f"{samples.reached} of {runs} seeds\n-")
            else:
                row.append(f"{scale_of(measure).value(samples.value)}\n{scale_of(timed).value(seconds.value)}")
    columns = [f"samples to {accuracy}\nseconds to {accuracy}" for accuracy in accuracies]
    return _table(comparison, "Samples and seconds to a held-out accuracy", columns, rows)


def _in_short(comparison: Comparison) -> list[Table]:
    """Means, and below them the smallest and the largest of the seeds: of lags, and of devices."""
    lags = [measure for key in _LAGS if (measure := comparison.measure(key)) is not None]
    devices = [measure for key in (_BOUND,) if (measure := comparison.measure(key)) is not None]
    devices += _different([measure for measure in comparison.measures if measure.key.startswith(_IDLE)])
    return [_means(comparison, "Lag", lags), _means(comparison, "Devices", devices)]


def _means(comparison: Comparison, title: str, measures: Sequence[Measure]) -> Table:
    columns = [_SHORT_TITLES.get(measure.key) or measure.key.replace(_IDLE, "idle ") for measure in measures]
    cells = range(len(comparison.cells))
    rows = [[_range(measure.cells[cell], scale_of(measure)) for measure in measures] for cell in cells]
    return _table(comparison, title, columns, rows)


def _different(measures: Sequence[Measure]) -> list[Measure]:
    """The measures without those that say the same as one before: roles on the same devices are idle together."""
    by_values = {str([dict(cell.per_seed) for cell in measure.cells]): measure for measure in reversed(measures)}
    return list(reversed(by_values.values()))


def _table(comparison: Comparison, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """rows: of each cell."""
    labels = [cell.label for cell in comparison.cells]
    if len(labels) > 1:
        labels[comparison.baseline] += "\n(baseline)"
    named = [[label, *row] for label, row in zip(labels, rows, strict=True)]
    backend = comparison.cells[0].runs[0].identity.backend
    timed = "" if backend == "real" else f" ({HOW_TIMED[backend]})"
    return Table(f"{title}{timed}", ["cell", *columns], named)


def _against(text: Against | None) -> str:
    return "-" if text is None else f"{text.value} {text.sign or ' '}\n{text.bounds}"


def _range(cell: CellMeasure, scale: Scale) -> str:
    """The mean, and below it the smallest and the largest of the seeds."""
    low, high = scale.value(min(cell.per_seed.values())), scale.value(max(cell.per_seed.values()))
    unit = " %" if scale.unit == "%" else ""
    mean = f"{scale.value(cell.value)}{unit}"
    return mean if low == high else f"{mean}\n{low}–{high}{unit}"


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, highlight=False, markup=False)
