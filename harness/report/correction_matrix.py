"""The matrix of schedules and corrections as a heat map, with the interval in every cell."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from harness.comparison.correction_matrix import CorrectionMatrix, Entry, lags
from harness.metrics.formatting import number
from harness.report.plots import save_in_every_format

COLORS = "viridis"  # readable for everyone, and in grey
_CELL = (1.55, 0.85)  # inches
_LOWER = 0.62  # high, where many stand below each other
_LEAST = (9.0, 3.2)  # inches: the title's width, the scale's height
_LUMINANCE = np.array([0.2126, 0.7152, 0.0722])  # of red, green and blue
_NOTE = "in brackets the 95 % interval of the mean; *: differs from the baseline, by seed"


def draw_matrix(folder: Path, matrix: CorrectionMatrix) -> list[Path]:
    """Draw matrix.png, matrix.svg and matrix.pdf into `folder`; returns their paths."""
    title = f"{matrix.what} · {matrix.about} · measured"
    return save_in_every_format(folder, "matrix", title, lambda figure: _draw(figure, matrix))


def _draw(figure: Figure, matrix: CorrectionMatrix) -> None:
    schedules = [f"{row}\nmean lag {lags(matrix, row)}" for row in matrix.rows]
    places = [[matrix.entries.get((row, column)) for column in matrix.columns] for row in matrix.rows]
    down, across, named = schedules, list(matrix.columns), "off-policy correction"
    if matrix.upright:
        down, across, named = across, down, "schedule"
        places = [list(column) for column in zip(*places, strict=True)]
    rows, columns = len(down), len(across)
    high = _LOWER if matrix.upright else _CELL[1]
    figure.set_size_inches(max(_LEAST[0], 3.6 + _CELL[0] * columns), max(_LEAST[1], 1.9 + high * rows))
    values = np.array([[math.nan if entry is None else entry.measured.value for entry in row] for row in places])
    axes = figure.subplots()
    shown = np.ma.masked_invalid(values)
    mesh = axes.pcolormesh(shown, cmap=COLORS, edgecolors="white", linewidth=1.5)
    axes.invert_yaxis()
    figure.colorbar(mesh, ax=axes, label="mean over seeds").outline.set_visible(False)
    rgba = colormaps[COLORS](Normalize(shown.min(), shown.max())(values))
    for row, column in np.ndindex(values.shape):
        dark = math.isfinite(values[row, column]) and rgba[row, column, :3] @ _LUMINANCE < 0.5
        axes.text(
            column + 0.5,
            row + 0.5,
            _text(places[row][column]),
            color="white" if dark else "0.15",
            ha="center",
            va="center",
            fontsize=9,
            linespacing=1.35,
        )
    axes.set_yticks(np.arange(rows) + 0.5, down, rotation=0)
    axes.set_xticks(np.arange(columns) + 0.5, across)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set(xlabel=f"{named}\n\n{_NOTE}")


def _text(entry: Entry | None) -> str:
    if entry is None:
        return "not run"
    mark = " (baseline)" if entry.baseline else " *" if entry.distinguishable else ""
    return f"{number(entry.measured.value)}{mark}\n{entry.interval_text}".rstrip()
