"""A comparison as tables for other programs and for papers: measures.csv, and table.tex with its headlines."""

from __future__ import annotations

import csv
import io

from harness.comparison.comparison import Comparison
from harness.comparison.measure_text import against, headlines, scale_of, titled
from harness.comparison.measures import Measure
from harness.comparison.statistics.estimates import Interval
from harness.metrics.formatting import latex_table

COLUMNS = (
    *("measure", "unit", "better", "cell", "baseline", "seeds", "mean", "low", "high"),
    *("compared", "against", "against_low", "against_high", "p", "called"),
)


def measures_csv(comparison: Comparison) -> str:
    """A row per measure and cell, as numbers; empty where there is none. seeds: `seed:value`, with spaces between;
    low, high: of the 95 % interval of the mean; compared: by `ratio` or `difference`, to the baseline; p: before, and
    called: after Holm's correction."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for measure in comparison.measures:
        for index, cell in enumerate(comparison.cells):
            values, found = measure.cells[index], measure.against_baseline(index)
            of_cell = (measure.key, measure.unit, measure.better or "", cell.label, int(index == comparison.baseline))
            seeds = " ".join(f"{seed}:{value:.12g}" for seed, value in values.per_seed.items())
            held = [*_three(found.interval), _number(found.p), int(found.distinguishable)] if found else [""] * 5
            table.writerow([*of_cell, seeds, *_three(values.interval), measure.compared, *held])
    return text.getvalue()


def table_tex(comparison: Comparison) -> str:
    """The headlines of every cell as a tabular of the package booktabs: means, their intervals, and what they are
    against the baseline, with a star where that is called a difference."""
    measures = headlines(comparison)
    heads = ["cell, simulated" if comparison.simulated else "cell", *map(titled, measures)]
    rows = [
        [cell.label, *(_in_words(measure, index) for measure in measures)]
        for index, cell in enumerate(comparison.cells)
    ]
    return latex_table(heads, rows)


def _three(interval: Interval | None) -> list[str]:
    if interval is None:
        return [""] * 3
    return [_number(value) for value in (interval.value, interval.low, interval.high)]


def _number(value: float) -> str:
    return f"{value:.12g}"


def _in_words(measure: Measure, index: int) -> str:
    scale, text, cell = scale_of(measure), against(measure, index), measure.cells[index]
    value = f"{scale.value(cell.value)} {scale.bounds(cell.interval)}"
    return value if text is None else f"{value}, {text.value}{'' if text.verdict == 'same' else '*'}"
