"""The matrix of schedules and corrections as a table whose cells are coloured by value."""

from __future__ import annotations

import math
from html import escape

from matplotlib import colormaps
from matplotlib.colors import to_hex

from harness.comparison.matrix import Entry, Matrix, lags, short
from harness.report.matrix import COLORS

_DARK = 0.45  # of the scale: above it black is easier to read than white


def heat_table(matrix: Matrix) -> str:
    """A row per schedule, a column per correction: mean, its interval, and every seed."""
    values = [its.measured.value for its in matrix.entries.values() if math.isfinite(its.measured.value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in matrix.columns)
    rows = []
    for row in matrix.rows:
        cells = "".join(_cell(matrix.entries.get((row, column)), low, high) for column in matrix.columns)
        lag = f"<small>mean lag {escape(lags(matrix, row))}</small>"
        rows.append(f'<tr><th scope="row">{escape(row)}{lag}</th>{cells}</tr>')
    head = f'<thead><tr><th scope="col">schedule</th>{heads}</tr></thead>'
    return f'<table class="heat">{head}<tbody>{"".join(rows)}</tbody></table>'


def _cell(entry: Entry | None, low: float, high: float) -> str:
    if entry is None:
        return "<td>not run</td>"
    measured = entry.measured
    mark = " baseline" if entry.baseline else " *" if entry.distinguishable else ""
    interval = measured.interval
    bounds = f"[{short(interval.low)}, {short(interval.high)}]" if interval is not None and interval.bounded else ""
    seeds = " ".join(short(value) for value in measured.per_seed.values())
    place = (measured.value - low) / (high - low) if high > low and math.isfinite(measured.value) else 1.0
    paint = f"background:{to_hex(colormaps[COLORS](place))};color:{'#000' if place > _DARK else '#fff'}"
    told = f"<b>{short(measured.value)}{mark}</b><small>{bounds}</small><small>{seeds}</small>"
    return f'<td style="{paint}">{told}</td>'
