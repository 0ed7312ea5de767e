"""A paper experiment's result: for people, as CSV, and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as RichTable

from harness.metrics.safe_files import write_text
from harness.papers.result import Line, Published, Result
from harness.report.plots import BLUE, GRAY, GREEN, save_figure

_SERIES = (("published", GRAY), ("simulated", BLUE), ("measured", GREEN))
_ROLES = {"base": "base", "fitted": "fitted to", "predicted": "", "measured": ""}


def show(result: Result, console: Console) -> None:
    """Print what is compared, at what scale, the figures, and what is missing."""
    its = result.experiment
    console.print(f"\n{its.title}", style="bold", highlight=False)
    for told in (its.source, its.compares, f"scale: {its.scale}"):
        console.print(told, highlight=False, soft_wrap=True, markup=False)
    table = RichTable(title_justify="left")
    for name in ("figure", "row", "", "published", "simulated", "measured on tiny", "error"):
        table.add_column(name, justify="left" if name in ("figure", "row", "") else "right")
    for line in result.lines:
        table.add_row(line.quantity, line.label, _ROLES[line.role], *_figures(line), _error(line))
    console.print(table, markup=False)
    for extra in result.tables:
        more = RichTable(title=extra.title, title_justify="left")
        for number, name in enumerate(extra.columns):
            more.add_column(name, justify="right" if number else "left")
        for row in extra.rows:
            more.add_row(*row)
        console.print(more)
    for note in result.notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    for missing in its.missing:
        console.print(f"missing: {missing}", highlight=False, soft_wrap=True, markup=False)


def write(result: Result, folder: Path) -> list[Path]:
    """Write <name>.csv and <name>.png into `folder`, and a <name>-<number>.csv for each further table."""
    folder.mkdir(parents=True, exist_ok=True)
    name, its = result.experiment.name, result.experiment
    header = ["quantity", "row", "role", "published", "simulated", "measured_on_tiny", "error", "within"]
    rows = [
        [
            line.quantity,
            line.label,
            line.role,
            *_figures(line),
            _error(line),
            "" if line.within is None else line.within,
        ]
        for line in result.lines
    ]
    remarks = [f"source: {its.source}", f"scale: {its.scale}", *result.notes]
    paths = [_write_csv(folder / f"{name}.csv", remarks, [header, *rows])]
    for number, table in enumerate(result.tables, 1):
        paths.append(_write_csv(folder / f"{name}-{number}.csv", [table.title], [list(table.columns), *table.rows]))
    draw = result.draw or (lambda figure: _bars(figure, result.lines))
    return [*paths, save_figure(folder / f"{name}.png", f"{its.title} · {_how(result.lines)}", draw)]


def _how(lines: Sequence[Line]) -> str:
    """What was done for it, as a picture's title says it."""
    simulated = any(line.simulated is not None for line in lines)
    measured = any(line.measured is not None for line in lines)
    return " and ".join([*(["simulated"] if simulated else []), *(["measured on tiny"] if measured else [])])


def _figures(line: Line) -> list[str]:
    return [text(line.published), text(line.simulated), text(line.measured)]


def _error(line: Line) -> str:
    if line.error is None:
        return ""
    return "inside" if isinstance(line.published, tuple) and line.error == 0 else f"{line.error:+.1%}"


def text(value: Published) -> str:
    """A figure as tables say it: three digits, or as many as a whole number has."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return f"{text(value[0])} to {text(value[1])}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def _write_csv(path: Path, remarks: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    written = io.StringIO()
    for remark in remarks:
        written.write(f"# {remark}\n")
    csv.writer(written, lineterminator="\n").writerows(rows)
    write_text(path, written.getvalue())
    return path


def _bars(figure: Figure, lines: Sequence[Line]) -> None:
    """A panel for each quantity, a bar for each figure; a published band is a bar from end to end."""
    quantities = list(dict.fromkeys(line.quantity for line in lines))
    counts = [sum(line.quantity == quantity for line in lines) for quantity in quantities]
    figure.set_size_inches(10, 1.4 + sum(0.5 + 0.55 * count for count in counts))
    panels = figure.subplots(len(quantities), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axes, quantity in zip(panels, quantities, strict=True):
        here = [line for line in lines if line.quantity == quantity]
        shown = [name for name, _ in _SERIES if any(not isinstance(_of(line, name), str | None) for line in here)]
        height = 0.8 / max(1, len(shown))
        places = np.arange(len(here), dtype=float)
        for number, (name, color) in enumerate((name, color) for name, color in _SERIES if name in shown):
            for place, line in zip(places, here, strict=True):
                value = _of(line, name)
                if isinstance(value, str | None):
                    continue
                left, width = (value[0], value[1] - value[0]) if isinstance(value, tuple) else (0.0, value)
                axes.barh(place - 0.4 + height * (number + 0.5), width, height * 0.92, left=left, color=color)
                axes.annotate(
                    text(value) + (f" ({_error(line)})" if name == "simulated" and _error(line) else ""),
                    (left + width, place - 0.4 + height * (number + 0.5)),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize="small",
                )
        axes.set_yticks(places, [f"{line.label}\n{_ROLES[line.role]}".strip() for line in here])
        axes.invert_yaxis()
        axes.set_xlabel(quantity)
        axes.margins(x=0.15)
        axes.grid(axis="y", visible=False)
    told = {name for line in lines for name, _ in _SERIES if not isinstance(_of(line, name), str | None)}
    handles = [figure.axes[0].barh(0, 0, color=color, label=name) for name, color in _SERIES if name in told]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _of(line: Line, name: str) -> Published:
    values: dict[str, Published] = {
        "published": line.published,
        "simulated": line.simulated,
        "measured": line.measured,
    }
    return values[name]
