"""A paper experiment's result for people: on the terminal, and as CSV, Markdown, LaTeX and a picture."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich.console import Console

from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import latex, latex_table, markdown_table
from harness.metrics.tables import Table, write_csv
from harness.report.drawing import legend_below, letters_across, lines_high, save_in_every_format
from harness.report.gantt import draw_same_seconds
from harness.report.palette import BLUE, GREEN, INK, OTHER
from harness.studies.papers.result import ROLES, Result, ResultLine, error, figures, overview, tables_of, text

_SERIES = {"published": OTHER, "simulated": BLUE, "measured_on_tiny": GREEN}
_HEIGHT = 0.8  # of all bars of a line
_SEED: Any = {"color": INK, "marker": "o", "markersize": 2.5, "linestyle": "none"}


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


def write(result: Result, folder: Path) -> list[Path]:
    """Write <name>.csv, a <name>-<number>.csv for each further table, <name>.md, <name>.tex with all of them, and the
    picture as PNG, SVG and PDF into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    experiment, lines = result.experiment, result.lines
    name = experiment.name
    remarks = [f"source: {experiment.source}", f"scale: {experiment.scale}", *result.notes]
    how = ["simulated"] if any(line.simulated is not None for line in lines) else []
    how += ["measured on tiny"] if any(line.measured is not None for line in lines) else []
    title, data = f"{experiment.title} · {' and '.join(how)}", as_table(lines)
    if result.timelines is None:
        pictures = save_in_every_format(folder, name, title, draw_bars, data, remarks)
    else:
        pictures = save_in_every_format(folder, f"{name}-timelines", title, draw_same_seconds, result.timelines)
        pictures.append(write_csv(folder / f"{name}.csv", data, remarks))
    paths = []
    for number, table in enumerate(result.tables, 1):
        paths.append(write_csv(folder / f"{name}-{number}.csv", _frame(table), [table.title]))
    page, tables = folder / f"{name}.md", folder / f"{name}.tex"
    write_text(page, markdown(result, pictures[0].name))
    write_text(tables, _latex(tables_of(result)))
    return [pictures.pop(), *paths, page, tables, *pictures]


def _frame(table: Table) -> pd.DataFrame:
    return pd.DataFrame([*table.rows], columns=[*table.columns])


def markdown(result: Result, picture: str) -> str:
    """The whole file; picture: the name of a file beside it."""
    experiment = result.experiment
    parts = [
        f"# {experiment.title}",
        f"    {result.command or f'cadence paper --paper {experiment.name}'}",
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
    """Write overview.md, the predictions of all and links to their pages; and overview.csv and overview.tex."""
    pages = "\n".join(f"- [{result.experiment.title}]({result.experiment.name}.md)" for result in results)
    table = overview(results)
    parts = ["# Published experiments", "    cadence paper --paper all", pages, f"**{table.title.capitalize()}**"]
    page, tables = folder / "overview.md", folder / "overview.tex"
    write_text(page, "\n\n".join([*parts, markdown_table(table.columns, table.rows)]) + "\n")
    write_text(tables, _latex([table]))
    return [write_csv(folder / "overview.csv", _frame(table), [table.title]), page, tables]


def as_table(lines: Sequence[ResultLine]) -> pd.DataFrame:
    """A row for each line: figures, error, promise, interval, verdict, every seed; empty where there is none."""
    rows = [
        {
            "quantity": line.quantity,
            "row": line.label,
            "role": line.role,
            **dict(zip(_SERIES, figures(line), strict=True)),
            "error": error(line),
            "within": "" if line.within is None else line.within,
            **dict(zip(("low", "high"), map(text, line.interval or (None, None)), strict=True)),
            "verdict": line.verdict,
            "seeds": " ".join(f"{value:.4g}" for value in line.seeds),
        }
        for line in lines
    ]
    return pd.DataFrame(rows)


def draw_bars(figure: Figure, data: pd.DataFrame) -> None:
    """A panel for each quantity, a bar for each figure, a dot for each seed; a published band is its own bar."""
    data = data.astype(object).fillna("").astype(str)
    width = letters_across(figure, 0.33)
    named = data.assign(
        name=[
            fill(f"{row} ({ROLES[role]})".removesuffix(" ()"), width)
            for row, role in zip(data["row"], data["role"], strict=True)
        ]
    )
    panels_of = [rows for _, rows in named.groupby("quantity", sort=False)]
    lines = [len(rows) * max(3.2, 1.2 * rows["name"].str.count("\n").max() + 1.2) for rows in panels_of]
    figure.set_figheight(lines_high(4 + sum(5 + count for count in lines)))
    panels = figure.subplots(len(lines), 1, squeeze=False, height_ratios=lines)[:, 0]
    for axes, rows in zip(panels, panels_of, strict=True):
        _panel(axes, rows)
    handles: list[Artist] = [Patch(facecolor=_SERIES[name], label=name.replace("_", " ")) for name in _drawn(data)]
    handles += [Line2D([], [], color=INK, label="80 % of systems drawn")] if data["low"].any() else []
    handles += [Line2D([], [], **_SEED, label="a seed")] if data["seeds"].any() else []
    legend_below(figure, handles)


def _panel(axes: Axes, rows: pd.DataFrame) -> None:
    shown, places, right = _drawn(rows), range(len(rows)), 0.0
    height = _HEIGHT / max(1, len(shown))
    letters = letters_across(axes.figure.figure, 0.6)
    for place, row in zip(places, rows.to_dict("records"), strict=True):
        for number, name in enumerate(shown):
            if (band := _band(row[name])) is None:
                continue
            at, ends = place - _HEIGHT / 2 + height * (number + 0.5), [band[1]]
            left, label = (band[0], text(band)) if band[0] < band[1] else (0.0, text(band[0]))
            axes.barh(at, band[1] - left, height * 0.92, left=left, color=_SERIES[name])
            if name == "simulated":
                label += f" ({row['error']})" if row["error"] else ""
                label += f"  {row['verdict']}" if row["verdict"] else ""
                if row["low"]:
                    ends += [_number(row["low"]), _number(row["high"])]
                    axes.plot(ends[1:], [at, at], color=INK, linewidth=1.6, solid_capstyle="butt")
            elif name == "measured_on_tiny":
                ends += (seeds := [*map(float, row["seeds"].split())])
                axes.plot(seeds, [at] * len(seeds), **_SEED)
            axes.annotate(label, (max(ends), at), (4, 0), textcoords="offset points", va="center", fontsize="small")
            right = max(right, max(ends) / (1 - min(0.7, (len(label) + 1) / letters)))  # room for words
    axes.set(yticks=places, yticklabels=rows["name"], ylim=(len(rows) - 0.5, -0.5), xlim=(0, right or None))
    axes.set_xlabel(fill(rows["quantity"].iloc[0], letters_across(axes.figure.figure, 0.7)))
    axes.grid(axis="y", visible=False)


def _drawn(rows: pd.DataFrame) -> list[str]:
    """The series that have a figure to draw."""
    return [name for name in _SERIES if any(_band(value) for value in rows[name])]


def _band(value: str) -> tuple[float, float] | None:
    """The ends of a band, which are one for a number; None for words, and where there is nothing."""
    low, _, high = value.partition(" to ")
    try:
        return _number(low), _number(high or low)
    except ValueError:
        return None


def _number(value: str) -> float:
    return float(value.replace(",", ""))
