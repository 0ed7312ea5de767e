"""Writes the report of a comparison: report.html, and report.md with its pictures."""

from __future__ import annotations

from pathlib import Path

from harness.comparison.result import Comparison
from harness.metrics.atomic_files import write_text
from harness.report.page.document import document
from harness.report.page.markdown import markdown
from harness.report.page.pictures import draw_comparison


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write report.html, which needs nothing else, and report.md with PNG pictures beside it; returns their paths.

    An earlier report in this folder is replaced, file by file.
    """
    page, twin = folder / "report.html", folder / "report.md"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(page, document(comparison))
    pictures = draw_comparison(comparison, folder)
    write_text(twin, markdown(comparison, [picture.name for picture in pictures]))
    return [page, twin, *pictures]
