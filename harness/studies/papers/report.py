"""A paper experiment's result for people: on the terminal, and as CSV, Markdown, LaTeX and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console

from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import latex, latex_table, markdown_table
from harness.metrics.tables import Table
from harness.report.drawing import legend_below, lines_high, save_in_every_format
from harness.report.palette import BLUE, GREEN, OTHER
from harness.studies.papers.result import (
    ROLES,
    Published,
    Result,
    ResultLine,
    error,
    figures,
    overview,
    tables_of,
    text,
)

_HEADER = (
    "quantity",
    "row",
    "role",
    "published",
    "simulated",
    "measured_on_tiny",
    "error",
    "within",
    "low",
    "high",
    "verdict",
)
_SERIES = {"published": OTHER, "simulated": BLUE, "measured": GREEN}
_HEIGHT = 0.8  # of all bars of a line


def show(result: Result, console: Console) -> None:
    """Print what is compared, at what scale, the figures, and what is missing."""
    experiment = result.experiment
    console.print(f"\n{experiment.title}", style="bold", highlight=False)
    for line in (experiment.source, experiment.compares, f"scale: {experiment.scale}"):
        console.print(line, highlight=False, markup=False)
    for table in tables_of(result):
        console.print(table)
    for line in (*result.notes, *(f"missing: {missing}" for missing in experiment.missing)):
        console.print(line, highlight=False, markup=False)


def show_overview(results: Sequence[Result], console: Console) -> None:
    """Print the predictions of all."""
    console.print(overview(results))


def write(result: Result, folder: Path) -> list[Path]:
    """Write <name>.csv, a <name>-<number>.csv for each further table, <name>.md, <name>.tex with all of them, and the
    picture as PNG, SVG and PDF into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    experiment, lines = result.experiment, result.lines
    name = experiment.name
    remarks = [f"source: {experiment.source}", f"scale: {experiment.scale}", *result.notes]
    rows = [
        [line.quantity, line.label, line.role, *figures(line), error(line), "" if line.within is None else line.within]
        + [*map(text, line.interval or (None, None)), line.verdict]
        for line in lines
    ]
    paths = [_write_csv(folder / f"{name}.csv", remarks, [_HEADER, *rows])]
    for number, table in enumerate(result.tables, 1):
        paths.append(_write_csv(folder / f"{name}-{number}.csv", [table.title], [list(table.columns), *table.rows]))
    how = ["simulated"] if any(line.simulated is not None for line in lines) else []
    how += ["measured on tiny"] if any(line.measured is not None for line in lines) else []
    draw = result.draw or (lambda figure: draw_bars(figure, lines))
    pictures = save_in_every_format(folder, name, f"{experiment.title} · {' and '.join(how)}", draw)
    page, tables = folder / f"{name}.md", folder / f"{name}.tex"
    write_text(page, markdown(result, pictures[0].name))
    write_text(tables, _latex(tables_of(result)))
    return [*paths, page, tables, *pictures]


def _write_csv(path: Path, remarks: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    written = io.StringIO()
    for remark in remarks:
        written.write(f"# {remark}\n")
    csv.writer(written, lineterminator="\n").writerows(rows)
    write_text(path, written.getvalue())
    return path


def markdown(result: Result, picture: str) -> str:
    """The whole file; picture: the name of a file beside it."""
    experiment = result.experiment
    parts = [
        f"# {experiment.title}",
        f"    cadence paper --paper {experiment.name}",
        f"Source: {experiment.source}.",
        f"Compares {experiment.compares}.",
        f"Scale: {experiment.scale}.",
    ]
    for table in tables_of(result):
        parts += [f"**{table.title.capitalize()}**", markdown_table(table.columns, table.rows)]
    parts.append(f"![{experiment.title}]({picture})")
    if result.notes:
        parts.append("\n".join(f"- {note}" for note in result.notes))
    if experiment.missing:
        parts.append("Missing:\n\n" + "\n".join(f"- {missing}" for missing in experiment.missing))
    return "\n\n".join(parts) + "\n"


def _latex(tables: Sequence[Table]) -> str:
    return "\n".join(
        latex_table(map(latex, table.columns), (map(latex, row) for row in table.rows), latex(table.title))
        for table in tables
    )


def write_overview(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write overview.md: the predictions of all in one table, and links to their pages; and the table as overview.csv
    and overview.tex."""
    pages = "\n".join(f"- [{result.experiment.title}]({result.experiment.name}.md)" for result in results)
    table = overview(results)
    parts = ["# Published experiments", "    cadence paper --paper all", pages, f"**{table.title.capitalize()}**"]
    page, tables = folder / "overview.md", folder / "overview.tex"
    write_text(page, "\n\n".join([*parts, markdown_table(table.columns, table.rows)]) + "\n")
    write_text(tables, _latex([table]))
    return [_write_csv(folder / "overview.csv", [table.title], [list(table.columns), *table.rows]), page, tables]


def draw_bars(figure: Figure, lines: Sequence[ResultLine]) -> None:
    """A panel for each quantity, a bar for each figure; a published band is a bar from end to end."""
    quantities = list(dict.fromkeys(line.quantity for line in lines))
    panels_of = [[line for line in lines if line.quantity == quantity] for quantity in quantities]
    figure.set_figheight(lines_high(4 + sum(5 + 3.2 * len(here) for here in panels_of)))
    panels = figure.subplots(len(quantities), 1, squeeze=False, height_ratios=[len(here) for here in panels_of])[:, 0]
    for axes, quantity, here in zip(panels, quantities, panels_of, strict=True):
        _panel(axes, quantity, here)
    legend_below(figure, [Patch(facecolor=_SERIES[name], label=name) for name in _drawn(lines)])


def _panel(axes: Axes, quantity: str, lines: Sequence[ResultLine]) -> None:
    shown = _drawn(lines)
    height = _HEIGHT / max(1, len(shown))
    for place, line in enumerate(lines):
        for number, name in enumerate(shown):
            value = _value(line, name)
            if isinstance(value, str | None):
                continue
            left, width = (value[0], value[1] - value[0]) if isinstance(value, tuple) else (0.0, value)
            at = place - _HEIGHT / 2 + height * (number + 0.5)
            axes.barh(at, width, height * 0.92, left=left, color=_SERIES[name])
            label, end = text(value), left + width
            if name == "simulated":
                label += f" ({error(line)})" if error(line) else ""
                label += f"  {line.verdict}" if line.verdict else ""
            if name == "simulated" and line.interval:
                axes.plot(line.interval, [at, at], color="0.15", linewidth=1.6, solid_capstyle="butt")
                end = max(end, line.interval[1])
            axes.annotate(label, (end, at), (4, 0), textcoords="offset points", va="center", fontsize="small")
    axes.set_yticks(np.arange(len(lines)), [f"{line.label}\n{ROLES[line.role]}".strip() for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel(quantity)
    axes.margins(x=0.35 if any(line.verdict for line in lines) else 0.15)  # room for words
    axes.grid(axis="y", visible=False)


def _drawn(lines: Sequence[ResultLine]) -> list[str]:
    """The series that have a figure to draw."""
    return [name for name in _SERIES if any(not isinstance(_value(line, name), str | None) for line in lines)]


def _value(line: ResultLine, series: str) -> Published:
    value: Published = getattr(line, series)
    return value
