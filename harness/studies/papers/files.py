"""A paper experiment's result as files: CSV, Markdown, a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from harness.metrics.atomic_files import write_text
from harness.report.plots import save_figure
from harness.studies.papers.markdown import markdown, overview_markdown
from harness.studies.papers.picture import draw_bars
from harness.studies.papers.result import Line, Result
from harness.studies.papers.tables import error, figures

_HEADER = ("quantity", "row", "role", "published", "simulated", "measured_on_tiny", "error", "within")


def write(result: Result, folder: Path) -> list[Path]:
    """Write <name>.csv, a <name>-<number>.csv for each further table, <name>.md and <name>.png into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    name, its = result.experiment.name, result.experiment
    remarks = [f"source: {its.source}", f"scale: {its.scale}", *result.notes]
    paths = [_write_csv(folder / f"{name}.csv", remarks, [_HEADER, *map(_row, result.lines)])]
    for number, table in enumerate(result.tables, 1):
        paths.append(_write_csv(folder / f"{name}-{number}.csv", [table.title], [list(table.columns), *table.rows]))
    draw = result.draw or (lambda figure: draw_bars(figure, result.lines))
    picture = save_figure(folder / f"{name}.png", f"{its.title} · {_how(result.lines)}", draw)
    page = folder / f"{name}.md"
    write_text(page, markdown(result, picture.name))
    return [*paths, page, picture]


def write_overview(results: Sequence[Result], folder: Path) -> Path:
    """Write overview.md: the predictions of all, and links to their pages."""
    path = folder / "overview.md"
    write_text(path, overview_markdown(results))
    return path


def _row(line: Line) -> list[object]:
    within = "" if line.within is None else line.within
    return [line.quantity, line.label, line.role, *figures(line), error(line), within]


def _how(lines: Sequence[Line]) -> str:
    """What was done for it, as a picture's title says it."""
    simulated = any(line.simulated is not None for line in lines)
    measured = any(line.measured is not None for line in lines)
    return " and ".join([*(["simulated"] if simulated else []), *(["measured on tiny"] if measured else [])])


def _write_csv(path: Path, remarks: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    written = io.StringIO()
    for remark in remarks:
        written.write(f"# {remark}\n")
    csv.writer(written, lineterminator="\n").writerows(rows)
    write_text(path, written.getvalue())
    return path
