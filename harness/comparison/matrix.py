"""A comparison of schedules and off-policy corrections as a matrix: a row per schedule, a column per correction."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.comparison.figures import EXACT_MATCH
from harness.comparison.parts import Cell, CellMeasure, Measure
from harness.comparison.result import Comparison
from harness.config import ConfigError
from harness.metrics.atomic_files import write_text

_NAME = "matrix"
_CORRECTION = "algorithm.correction"
_AXES = {"schedule", "schedule.max_staleness", "schedule.k", _CORRECTION}
"""What the rows and columns of a matrix tell apart."""


@dataclass(frozen=True)
class Entry:
    """One cell of the matrix: what it reached and how stale its samples were.

    distinguishable: whether its difference to the baseline is called one; False for the baseline.
    """

    measured: CellMeasure
    lag: float  # iterations, mean over samples and seeds
    baseline: bool
    distinguishable: bool


@dataclass(frozen=True)
class Matrix:
    """rows, columns: in the order of the comparison's cells; entries: by row and column, as far as there are any.

    what: of which measure; about: model, task, seeds and samples, which are equal in all cells.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    entries: Mapping[tuple[str, str], Entry]
    what: str
    about: str


def has_matrix(comparison: Comparison) -> bool:
    """Whether these cells differ in correction, in nothing that a matrix has no place for, and were rewarded."""
    axes = set(comparison.axes)
    return _CORRECTION in axes and axes <= _AXES and comparison.measure(EXACT_MATCH) is not None


def matrix_of(comparison: Comparison, key: str = EXACT_MATCH) -> Matrix:
    """Raises ConfigError where these runs do not have the measure, or two cells differ in more than a matrix has."""
    measure, lag = comparison.measure(key), comparison.measure("staleness/mean")
    if measure is None or lag is None:
        raise ConfigError(f"these runs have no {key}: simulated runs learn nothing; set backend=real")
    entries: dict[tuple[str, str], Entry] = {}
    for index, cell in enumerate(comparison.cells):
        place = (row_of(cell), str(cell.runs[0].config["algorithm"]["correction"]))
        if place in entries:
            raise ConfigError(f"two cells are {place[0]} under {place[1]}; a matrix has no place for what else differs")
        entries[place] = Entry(
            measure.cells[index],
            lag.cells[index].value,
            index == comparison.baseline,
            _is_called(measure, index),
        )
    rows, columns = (tuple(dict.fromkeys(place[axis] for place in entries)) for axis in (0, 1))
    return Matrix(rows, columns, entries, measure.title, _about(comparison))


def row_of(cell: Cell) -> str:
    """The schedule, and how far ahead it may be where that is an option of it."""
    schedule = cell.runs[0].config["schedule"]
    ahead = next((schedule[name] for name in ("max_staleness", "k") if name in schedule), None)
    return str(schedule["name"]) if ahead is None else f"{schedule['name']} {ahead:g}"


def write_matrix(folder: Path, matrix: Matrix) -> list[Path]:
    """matrix.csv, a line per cell, and matrix.md, the table for people; returns their paths."""
    paths = [folder / f"{_NAME}.csv", folder / f"{_NAME}.md"]
    for path, text in zip(paths, (as_csv(matrix), as_markdown(matrix)), strict=True):
        write_text(path, text)
    return paths


def as_csv(matrix: Matrix) -> str:
    """schedule, correction, mean lag, mean, its interval, whether it differs from the baseline, then every seed."""
    seeds = sorted({seed for entry in matrix.entries.values() for seed in entry.measured.per_seed})
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ["schedule", "correction", "lag", "mean", "low", "high", "differs", *(f"seed {seed}" for seed in seeds)]
    )
    for (row, column), entry in matrix.entries.items():
        low, high = _bounds(entry.measured)
        differs = "baseline" if entry.baseline else str(entry.distinguishable).lower()
        values = [entry.measured.per_seed.get(seed, "") for seed in seeds]
        table.writerow([row, column, entry.lag, entry.measured.value, low, high, differs, *values])
    return text.getvalue()


def as_markdown(matrix: Matrix) -> str:
    """A row per schedule with its lags; the mean in bold, its interval, and every seed."""
    lines = [
        f"{matrix.what.capitalize()} ({matrix.about}). Bold: mean over seeds; in brackets its 95 % interval; then",
        "every seed. \\*: the difference to the baseline, paired by seed, is called one.",
        "",
        "| schedule | mean lag | " + " | ".join(matrix.columns) + " |",
        "|---|---:|" + "---|" * len(matrix.columns),
    ]
    for row in matrix.rows:
        cells = [_told(matrix.entries.get((row, column))) for column in matrix.columns]
        lines.append(f"| `{row}` | {lags(matrix, row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def lags(matrix: Matrix, row: str) -> str:
    """Mean lags of a row's cells, from the smallest to the largest."""
    found = sorted(entry.lag for (its, _), entry in matrix.entries.items() if its == row)
    low, high = f"{found[0]:.2f}", f"{found[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def short(value: float) -> str:
    """.879, as exact matches are read."""
    return f"{value:.3f}".replace("0.", ".", 1) if 0 <= value < 1 else f"{value:.3g}"


def _told(entry: Entry | None) -> str:
    if entry is None:
        return "not run"
    low, high = _bounds(entry.measured)
    interval = f" [{short(low)}, {short(high)}]" if math.isfinite(low) else ""
    seeds = " ".join(short(value) for value in entry.measured.per_seed.values())
    mark = " baseline" if entry.baseline else "\\*" if entry.distinguishable else ""
    return f"**{short(entry.measured.value)}**{mark}{interval} ({seeds})"


def _bounds(measured: CellMeasure) -> tuple[float, float]:
    interval = measured.interval
    return (-math.inf, math.inf) if interval is None else (interval.low, interval.high)


def _is_called(measure: Measure, cell: int) -> bool:
    against = measure.against_baseline(cell)
    return against is not None and against.distinguishable


def _about(comparison: Comparison) -> str:
    run = comparison.cells[0].runs[0]
    samples, seeds = run.metrics[-1]["samples"], len(comparison.cells[0].runs)
    told = [run.identity.model, run.config["task"]["name"], f"{samples:,} samples", f"{seeds} seed{'s' * (seeds > 1)}"]
    return " · ".join(told)
