"""The pictures of report.md: curves, profiles, staleness, idle time, in the page's colours; and the matrix of schedules
and corrections as a heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from harness.comparison.comparison import Comparison
from harness.comparison.correction_matrix import CorrectionMatrix, Entry, lags_of
from harness.comparison.curves import LEARNING, PerformanceProfile, StalenessHistogram, role_times
from harness.comparison.measures import OUTCOMES, SPEED
from harness.metrics.formatting import number
from harness.report.gantt import NamedTimeline, data_versions, draw_same_seconds
from harness.report.page.data import AXES, TITLES
from harness.report.page.text import Headings, share_label
from harness.report.page.verdict_chart import chart_of, draw_chart
from harness.report.palette import DASHES, OTHER, of_cells
from harness.report.plots import FORMATS, draw_idle, save_in_every_format

_BAND_FROM = 3  # seeds
_GRAIN = 0.05  # of the axis of scores
PICTURES = ("verdict", "curves", "staleness", "idle", "profiles", "timelines")


def draw_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """verdict, curves, staleness, idle, profiles and timelines in `folder`, each as PNG, SVG and PDF. Where there is no
    verdict, nothing was rewarded, or a cell is alone, there is none of it, and none from before."""
    headings = Headings(comparison)
    title = f"{headings.curves_title} · {headings.on} · {headings.how_word}"
    drawings = {
        "curves": (title, draw_curves),
        "staleness": (f"Staleness · {headings.on} · {headings.how_word}", draw_staleness),
        "idle": (f"Idle time · {headings.on} · {headings.how_word}", _draw_idle),
    }
    if comparison.profiles:
        drawings["profiles"] = (f"Performance profiles · {headings.on} · {headings.how_word}", draw_profiles)
    if len(comparison.cells) > 1:
        drawings["timelines"] = (f"The same seconds · {headings.on} · {headings.how_word}", draw_timelines)
    if chart := chart_of(comparison):
        drawings = {
            "verdict": (f"{headings.heading} · {headings.how_word}", lambda _, f: draw_chart(chart, f))
        } | drawings
    for path in (folder / f"{name}.{end}" for name in PICTURES for end in FORMATS):
        path.unlink(missing_ok=True)
    return [
        path
        for name, (title, draw) in drawings.items()
        for path in save_in_every_format(folder, name, title, partial(draw, comparison))
    ]


def draw_curves(comparison: Comparison, figure: Figure) -> None:
    """Draw what is learnt, or response length where nothing is rewarded, against samples, tokens and seconds: a panel
    each."""
    present = [curve.key for curve in comparison.curves]
    key = next((key for key in LEARNING if key in present), present[0])
    figure.set_size_inches(13, 4.4)
    panels, colors = figure.subplots(1, len(AXES), sharey=True), of_cells(comparison.cells)
    for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
        for curve in comparison.curves:
            if (curve.key, curve.axis) != (key, axis):
                continue
            color = colors[curve.cell]
            if len(curve.per_seed) >= _BAND_FROM:
                panel.fill_between(curve.grid, curve.low, curve.high, color=color, alpha=0.12, linewidth=0)
            for values in curve.per_seed.values():
                panel.plot(curve.grid, values, color=color, linewidth=0.7, alpha=0.4)
            dash = DASHES[curve.cell % len(DASHES)]
            style = (0, tuple(float(part) / 2 for part in dash.split())) if dash else "-"
            name = comparison.cells[curve.cell].label
            panel.plot(curve.grid, curve.mean, color=color, linewidth=2.2, linestyle=style, label=name)
        simulated = "simulated " if comparison.simulated and axis == "seconds" else ""
        panel.set(xlabel=f"{simulated}{label}", xlim=(0, None), ylim=(0, 1.02 if key in OUTCOMES else None))
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    panels[0].set_ylabel(TITLES.get(key, key))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(handles), 6))


def draw_timelines(comparison: Comparison, figure: Figure) -> None:
    """The first runs of the baseline, and of the fastest of the others, over the same seconds."""
    speed = comparison.measure(SPEED)
    assert speed is not None, "every run has a speed"
    others = [index for index in range(len(comparison.cells)) if index != comparison.baseline]
    fastest = max(others, key=lambda index: speed.cells[index].value)
    cells = [comparison.cells[index] for index in (comparison.baseline, fastest)]
    runs = [
        NamedTimeline(cell.label, run.timeline, data_versions(run.timeline, run.samples))
        for cell in cells
        for run in cell.runs[:1]
    ]
    draw_same_seconds(figure, runs)


def draw_staleness(comparison: Comparison, figure: Figure) -> None:
    """A histogram of worst lags per cell, all on one scale."""
    panels, colors = _panel_each(figure, len(comparison.cells), 2.6), of_cells(comparison.cells)
    for panel, cell, lags, color in zip(panels, comparison.cells, comparison.staleness, colors, strict=True):
        draw_lags(panel, lags, color)
        panel.set_title(cell.label)


def draw_lags(panel: Axes, lags: StalenessHistogram, color: str) -> None:
    """A bar for each worst lag: its share of the trained samples."""
    shares, names = lags.grouped()
    bars = panel.bar(names, shares, width=0.8, color=color)
    panel.bar_label(bars, [share_label(share) if share else "" for share in shares], padding=2, fontsize="small")
    panel.set(xlabel="worst lag (iterations)", ylim=(0, 1.12), yticks=(0, 0.5, 1))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.grid(axis="x", visible=False)


def _panel_each(figure: Figure, count: int, height: float) -> list[Axes]:
    """Make so many panels, four in a row of `height` inches, on one vertical scale."""
    columns = min(count, 4)
    rows = -(-count // columns)
    figure.set_size_inches(3.3 * columns, 0.5 + height * rows)
    panels = list(np.atleast_1d(figure.subplots(rows, columns, sharey=True)).ravel())
    for panel in panels[count:]:
        panel.set_visible(False)
    return panels[:count]


def draw_profiles(comparison: Comparison, figure: Figure) -> None:
    """Draw the share of every cell's seeds that end above each accuracy, its interval, and the baseline in grey."""
    panels, colors = _panel_each(figure, len(comparison.cells), 2.4), of_cells(comparison.cells)
    for panel, cell, profile, color in zip(panels, comparison.cells, comparison.profiles, colors, strict=True):
        draw_profile(panel, profile, comparison, color)
        panel.set_title(cell.label)


def draw_profile(panel: Axes, profile: PerformanceProfile, comparison: Comparison, color: str) -> None:
    """A cell's steps and their band, the baseline's behind, over the scores in which any cell's seeds end."""
    base, scores = comparison.profiles[comparison.baseline], score_range(comparison.profiles)
    turns = _turns(profile.shares, profile.low, profile.high)
    taus, low, high = (values[turns] for values in (profile.taus, profile.low, profile.high))
    panel.fill_between(taus, low, high, step="post", color=color, alpha=0.13, linewidth=0)
    for of, stroke, width in ((base, OTHER, 1.0), (profile, color, 2.2)):
        turns = _turns(of.shares)
        panel.step(of.taus[turns], of.shares[turns], where="post", color=stroke, linewidth=width)
    outcome = comparison.outcome
    panel.set(xlabel="" if outcome is None else TITLES[outcome.key], xlim=scores, ylim=(0, 1.04), yticks=(0, 0.5, 1))
    panel.set_xticks(ticks := np.linspace(*scores, 3), [f"{score:.3g}" for score in ticks])
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _turns(*steps: np.ndarray) -> np.ndarray:
    """Indices at which one of these lines of steps turns, and the ends: of a thousand points no other is drawn."""
    turned = np.any([np.diff(line, prepend=np.nan, append=np.nan)[:-1] != 0 for line in steps], axis=0)
    turned[-1] = True
    return np.flatnonzero(turned)


def score_range(profiles: Sequence[PerformanceProfile]) -> tuple[float, float]:
    """The part of the scores in which the seeds of any cell end, with some room."""
    low = min(float(profile.taus[np.argmax(profile.shares < 1.0)]) for profile in profiles)
    high = max(float(profile.taus[np.argmax(profile.shares <= 0.0)]) for profile in profiles)
    grains = np.floor(low / _GRAIN - 0.2), np.ceil(high / _GRAIN + 0.2)
    least, most = (float(np.clip(grain * _GRAIN, 0.0, 1.0)) for grain in grains)
    return least, most


def _draw_idle(comparison: Comparison, figure: Figure) -> None:
    times = [(cell.label, time) for cell in comparison.cells for time in role_times(cell.timelines)]
    draw_idle(figure, times, "share of the time after warm-up, mean over devices and seeds")


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
    schedules = [f"{row}\nmean lag {lags_of(matrix, row)}" for row in matrix.rows]
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
