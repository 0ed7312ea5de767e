"""A comparison of schedules and off-policy corrections as a matrix: a row per schedule, a column per correction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.comparison.comparison import Comparison
from harness.comparison.measures import EXACT_MATCH, CellMeasure, Measure
from harness.comparison.runs import Cell
from harness.config import ConfigError
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import number, plural

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

    @property
    def mark(self) -> str:
        return "baseline" if self.baseline else "*" if self.distinguishable else ""

    @property
    def interval_text(self) -> str:
        """In brackets; empty where there is none."""
        interval = self.measured.interval
        bounded = interval is not None and interval.bounded
        return f"[{number(interval.low)}, {number(interval.high)}]" if interval is not None and bounded else ""

    @property
    def seeds_text(self) -> str:
        return " ".join(number(value) for value in self.measured.per_seed.values())


@dataclass(frozen=True)
class CorrectionMatrix:
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


def matrix_of(comparison: Comparison, key: str = EXACT_MATCH) -> CorrectionMatrix:
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
            _differs(measure, index),
        )
    rows, columns = (tuple(dict.fromkeys(place[axis] for place in entries)) for axis in (0, 1))
    return CorrectionMatrix(rows, columns, entries, measure.title, _about(comparison))


def row_of(cell: Cell) -> str:
    """The schedule, and how far ahead it may be where that is an option of it."""
    schedule = cell.runs[0].config["schedule"]
    ahead = next((schedule[name] for name in ("max_staleness", "k") if name in schedule), None)
    return str(schedule["name"]) if ahead is None else f"{schedule['name']} {ahead:g}"


def write_matrix(folder: Path, matrix: CorrectionMatrix) -> list[Path]:
    """matrix.csv, a line per cell, and matrix.md, the table for people; returns their paths."""
    paths = [folder / f"{_NAME}.csv", folder / f"{_NAME}.md"]
    for path, text in zip(paths, (as_csv(matrix), as_markdown(matrix)), strict=True):
        write_text(path, text)
    return paths


def as_csv(matrix: CorrectionMatrix) -> str:
    """schedule, correction, mean lag, mean, its interval, whether it differs from the baseline, then every seed."""
    rows = []
    for (row, column), entry in matrix.entries.items():
        low, high = _bounds(entry.measured)
        differs = "baseline" if entry.baseline else str(entry.distinguishable).lower()
        mean = {"lag": entry.lag, "mean": entry.measured.value, "low": low, "high": high, "differs": differs}
        seeds = {f"seed {seed}": value for seed, value in sorted(entry.measured.per_seed.items())}
        rows.append({"schedule": row, "correction": column, **mean, **seeds})
    return pd.DataFrame(rows).to_csv(index=False)


def as_markdown(matrix: CorrectionMatrix) -> str:
    """A row per schedule with its lags; the mean in bold, its interval, and every seed."""
    lines = [
        f"{matrix.what.capitalize()} ({matrix.about}). Bold: mean over seeds; in brackets its 95 % interval; then",
        "every seed. \\*: the difference to the baseline, paired by seed, is called one.",
        "",
        "| schedule | mean lag | " + " | ".join(matrix.columns) + " |",
        "|---|---:|" + "---|" * len(matrix.columns),
    ]
    for row in matrix.rows:
        cells = [_markdown(matrix.entries.get((row, column))) for column in matrix.columns]
        lines.append(f"| `{row}` | {lags(matrix, row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def lags(matrix: CorrectionMatrix, row: str) -> str:
    """Mean lags of a row's cells, from the smallest to the largest."""
    found = sorted(entry.lag for (entry_row, _), entry in matrix.entries.items() if entry_row == row)
    low, high = number(found[0], 2), number(found[-1], 2)
    return low if low == high else f"{low} to {high}"


def _markdown(entry: Entry | None) -> str:
    if entry is None:
        return "not run"
    mark = f" {entry.mark}" if entry.baseline else f"\\{entry.mark}" if entry.mark else ""
    interval = f" {entry.interval_text}" if entry.interval_text else ""
    return f"**{number(entry.measured.value)}**{mark}{interval} ({entry.seeds_text})"


def _bounds(measured: CellMeasure) -> tuple[float, float]:
    interval = measured.interval
    return (-math.inf, math.inf) if interval is None else (interval.low, interval.high)


def _differs(measure: Measure, cell: int) -> bool:
    against = measure.against_baseline(cell)
    return against is not None and against.distinguishable


def _about(comparison: Comparison) -> str:
    run = comparison.cells[0].runs[0]
    samples, seeds = run.metrics[-1]["samples"], len(comparison.cells[0].runs)
    parts = [run.identity.model, run.config["task"]["name"], plural(samples, "sample"), plural(seeds, "seed")]
    return " · ".join(parts)
