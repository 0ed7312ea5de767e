"""A comparison of schedules and off-policy corrections as a matrix: a row per schedule, a column per correction."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pandas as pd

from harness.comparison.comparison import Comparison
from harness.comparison.measures import CellMeasure
from harness.comparison.runs import Cell
from harness.comparison.statistics import Difference, corrected, paired_difference
from harness.config import ConfigError
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import latex, latex_table, number, plural

_NAME = "matrix"
_LAG = "mean lag"
WIDEST = 6  # columns that lie across a page
_FEWEST_SEEDS = 3  # to tell pairs apart
_CORRECTION = "algorithm.correction"
_SCHEDULE = {"schedule", "schedule.max_staleness", "schedule.k"}  # settings that distinguish the rows of a matrix
_ALGORITHM = "algorithm."
"""Beginning of the settings that distinguish its columns: corrections, with all that belongs to them."""


@dataclass(frozen=True)
class Entry:
    """A cell of the matrix: what it reached and how stale its samples were. distinguishable: whether its difference to
    the baseline is called one; False for the baseline."""

    measured: CellMeasure
    lag: float  # iterations, mean over samples and seeds
    baseline: bool
    distinguishable: bool

    @property
    def mark(self) -> str:
        """The word or star that marks it."""
        return "baseline" if self.baseline else "*" if self.distinguishable else ""

    @property
    def interval_text(self) -> str:
        """The interval in brackets; empty where there is none."""
        interval = self.measured.interval
        bounded = interval is not None and interval.bounded
        return f"[{number(interval.low)}, {number(interval.high)}]" if interval is not None and bounded else ""

    @property
    def seeds_text(self) -> str:
        """Values of all seeds."""
        return " ".join(number(value) for value in self.measured.per_seed.values())


@dataclass(frozen=True)
class CorrectionPair:
    """Two corrections under one schedule: one - other, by seed. distinguishable: after Holm's correction of the row."""

    one: str
    other: str
    difference: Difference


@dataclass(frozen=True)
class CorrectionMatrix:
    """The matrix. rows, columns: in the order of the comparison's cells; entries: by row and column, as far as there
    are any. what: of which measure; about: model, task, seeds and samples, which are equal in all cells."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    entries: Mapping[tuple[str, str], Entry]
    pairs: Mapping[str, Sequence[CorrectionPair]]
    what: str
    about: str

    @property
    def upright(self) -> bool:
        """Whether it has too many columns to lie across a page."""
        return len(self.columns) > WIDEST

    @property
    def of_one_seed(self) -> bool:
        """Whether each entry is of one run: then nothing has an interval."""
        return all(len(entry.measured.per_seed) == 1 for entry in self.entries.values())

    @property
    def key(self) -> str:
        """How to read its entries."""
        if self.of_one_seed:
            return "Of one seed: there are no intervals."
        return (
            "Bold: mean over seeds; in brackets its 95 % interval; then every seed. *: the difference to the baseline, "
            "paired by seed, is significant."
        )


def has_matrix(comparison: Comparison) -> bool:
    """Whether these cells differ in correction, in nothing that a matrix has no place for, and were rewarded."""
    axes = comparison.axes
    placed = all(axis in _SCHEDULE or axis.startswith(_ALGORITHM) for axis in axes)
    places = {(row_of(cell), column_of(cell)) for cell in comparison.cells}
    whole = len(places) == len(comparison.cells) and comparison.outcome is not None
    return _CORRECTION in axes and placed and whole


def matrix_of(comparison: Comparison) -> CorrectionMatrix:
    """The matrix of what was learnt. Raises ConfigError where that is nothing, or cells differ in more than it has."""
    measure, lag = comparison.outcome, comparison.measure("staleness/mean")
    if measure is None or lag is None:
        raise ConfigError("these runs have no reward: simulated runs learn nothing; set backend=real")
    entries: dict[tuple[str, str], Entry] = {}
    for index, cell in enumerate(comparison.cells):
        place = (row_of(cell), column_of(cell))
        if place in entries:
            raise ConfigError(f"two cells are {place[0]} under {place[1]}; a matrix has no place for what else differs")
        against = measure.against_baseline(index)
        differs = against is not None and against.distinguishable
        entries[place] = Entry(measure.cells[index], lag.cells[index].value, index == comparison.baseline, differs)
    rows, columns = (tuple(dict.fromkeys(place[axis] for place in entries)) for axis in (0, 1))
    pairs = {
        row: _pairs([(column, entries[row, column]) for column in columns if (row, column) in entries]) for row in rows
    }
    return CorrectionMatrix(rows, columns, entries, pairs, measure.title, _about(comparison))


def row_of(cell: Cell) -> str:
    """The schedule, and how far ahead it may be where that is an option of it."""
    schedule = cell.runs[0].config["schedule"]
    ahead = next((schedule[name] for name in ("max_staleness", "k") if name in schedule), None)
    return str(schedule["name"]) if ahead is None else f"{schedule['name']} {ahead:g}"


def column_of(cell: Cell) -> str:
    """The correction: as the matrix was asked for it, elsewhere the name of its loss."""
    config = cell.runs[0].config
    row, _, asked = cell.label.rpartition(", ")
    return asked if row.startswith(config["schedule"]["name"]) else str(config["algorithm"]["correction"])


def _pairs(entries: Sequence[tuple[str, Entry]]) -> tuple[CorrectionPair, ...]:
    """Each two of these, by seed; none below three seeds: exact matches are counts, and of so many pairs some differ by
    the same count under two seeds, without any scatter, by chance."""
    enough = all(len(entry.measured.per_seed) >= _FEWEST_SEEDS for _, entry in entries)
    two = list(combinations(entries, 2)) if enough else []
    differences = corrected([paired_difference(a.measured.per_seed, b.measured.per_seed) for (_, a), (_, b) in two])
    return tuple(
        CorrectionPair(one, other, each) for ((one, _), (other, _)), each in zip(two, differences, strict=True)
    )


def write_matrix(folder: Path, matrix: CorrectionMatrix) -> list[Path]:
    """The table for people, matrix.md, and for papers, matrix.tex; returns their paths."""
    texts = {"md": as_markdown(matrix), "tex": as_latex(matrix)}
    paths = [folder / f"{_NAME}.{end}" for end in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_text(path, text)
    return paths


def as_frame(matrix: CorrectionMatrix) -> pd.DataFrame:
    """A row per cell: schedule, correction, mean lag, mean, interval, whether it differs from the baseline, seeds."""
    rows = []
    for (row, column), entry in matrix.entries.items():
        interval = entry.measured.interval
        low, high = (-math.inf, math.inf) if interval is None else (interval.low, interval.high)
        differs = "baseline" if entry.baseline else str(entry.distinguishable).lower()
        mean = {"lag": entry.lag, "mean": entry.measured.value, "low": low, "high": high, "differs": differs}
        seeds = {f"seed {seed}": value for seed, value in sorted(entry.measured.per_seed.items())}
        rows.append({"schedule": row, "correction": column, **mean, **seeds})
    return pd.DataFrame(rows)


def as_markdown(matrix: CorrectionMatrix) -> str:
    """The mean in bold, its interval, and every seed; lags of every schedule; then which differ significantly."""
    lines = [f"{matrix.what.capitalize()} ({matrix.about}).", matrix.key.replace("*", "\\*"), ""]
    heads, rows = _table(matrix, _markdown, "`{}`")
    rule = ["---", *("---:" if head == _LAG else "---" for head in heads[1:])]
    lines += [f"| {' | '.join(line)} |" for line in (heads, rule, *rows)]
    return "\n".join([*lines, "", *significant_pairs(matrix)]) + "\n"


def as_latex(matrix: CorrectionMatrix) -> str:
    """Means, bold where the difference to the baseline is significant, and their intervals."""
    heads, rows = _table(matrix, _latex, "{}")
    base = next((" under ".join(place) for place, entry in matrix.entries.items() if entry.baseline), "")
    means = "of one seed" if matrix.of_one_seed else "means over seeds, 95 % intervals in brackets"
    caption = f"{matrix.what.capitalize()} ({matrix.about}): {means}."
    notes = [latex(f"Baseline: {base}.")] if base else []
    if any(entry.distinguishable for entry in matrix.entries.values()):
        notes.append("Bold: the difference to it, paired by seed, is significant.")
    named = ([latex(name), *cells] for name, *cells in rows)
    return latex_table(map(latex, heads), named, latex(caption), notes)


def _table(
    matrix: CorrectionMatrix, cell: Callable[[Entry | None], str], name: str
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: a row per schedule, or where many corrections stand beside few schedules, per correction. name:
    how that of a schedule, or of a row, is written."""
    if matrix.upright:
        heads = ["correction", *(f"{name.format(row)}, {_LAG} {lags_of(matrix, row)}" for row in matrix.rows)]
        columns = matrix.columns
        return heads, [[name.format(c), *(cell(matrix.entries.get((row, c))) for row in matrix.rows)] for c in columns]
    return ["schedule", _LAG, *matrix.columns], [
        [name.format(row), lags_of(matrix, row), *(cell(matrix.entries.get((row, c))) for c in matrix.columns)]
        for row in matrix.rows
    ]


def _latex(entry: Entry | None) -> str:
    if entry is None:
        return "not run"
    mean = latex(number(entry.measured.value))
    bold = rf"\textbf{{{mean}}}" if entry.distinguishable else mean
    return rf"{bold} {{\scriptsize {latex(entry.interval_text)}}}" if entry.interval_text else bold


def significant_pairs(matrix: CorrectionMatrix) -> list[str]:
    """A line per schedule: which of its corrections differ significantly."""
    if not any(matrix.pairs.values()):
        return [f"Fewer than {_FEWEST_SEEDS} seeds, or one correction: no difference can be significant."]
    return [
        f"- `{row}`, significant differences (by seed, Holm's correction over {plural(len(pairs), 'pair')}): "
        f"{_apart(pairs)}."
        for row, pairs in matrix.pairs.items()
    ]


def _apart(pairs: Sequence[CorrectionPair]) -> str:
    """`clip above none, tis; mis above none`."""
    below: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.difference.distinguishable:
            first = pair.difference.interval.value > 0
            better, worse = (pair.one, pair.other) if first else (pair.other, pair.one)
            below.setdefault(better, []).append(worse)
    return "; ".join(f"{better} above {', '.join(worse)}" for better, worse in below.items()) or "none"


def lags_of(matrix: CorrectionMatrix, row: str) -> str:
    """Mean lags of a row's cells, from the smallest to the largest."""
    return lags_text([entry.lag for (entry_row, _), entry in matrix.entries.items() if entry_row == row])


def lags_text(lags: Iterable[float]) -> str:
    """The smallest and the largest."""
    found = sorted(lags)
    low, high = number(found[0], 2), number(found[-1], 2)
    return low if low == high else f"{low} to {high}"


def _markdown(entry: Entry | None) -> str:
    if entry is None:
        return "not run"
    mark = f" {entry.mark}" if entry.baseline else f"\\{entry.mark}" if entry.mark else ""
    interval = f" {entry.interval_text}" if entry.interval_text else ""
    return f"**{number(entry.measured.value)}**{mark}{interval} ({entry.seeds_text})"


def _about(comparison: Comparison) -> str:
    run = comparison.cells[0].runs[0]
    samples, seeds = run.metrics[-1]["samples"], len(comparison.cells[0].runs)
    parts = [run.identity.model, run.config["task"]["name"], plural(samples, "sample"), plural(seeds, "seed")]
    return " · ".join(parts)
