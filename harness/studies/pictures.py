"""Every picture that is drawn from the table beside it, by the columns of that table."""

from __future__ import annotations

from harness.report.drawing import DrawTable
from harness.report.page import pictures
from harness.studies.papers.report import draw_bars
from harness.studies.scaling import draw_scaling
from harness.studies.staleness import draw_formulas

DRAWINGS: dict[DrawTable, frozenset[str]] = {
    **pictures.DRAWINGS,
    draw_bars: frozenset({"quantity", "published", "measured_on_tiny"}),
    draw_scaling: frozenset({"model", "schedule", "devices", "of_ideal"}),
    draw_formulas: frozenset({"sigma", "fifo", "fifo_formula"}),
}
