"""The pictures of report.md: curves, profiles, staleness, idle time, in the page's colours; and the matrix of schedules
and corrections as a heat map."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from harness.comparison.comparison import Comparison
from harness.comparison.correction_matrix import CorrectionMatrix, Entry, lags_of
from harness.comparison.curves import LEARNING, PerformanceProfile, StalenessHistogram, role_times
from harness.comparison.measures import LAG, OUTCOMES, SPEED
from harness.metrics.formatting import number
from harness.report.drawing import legend_below, lines_high, panels, save_for_column, save_in_every_format
from harness.report.gantt import NamedTimeline, data_versions, draw_same_seconds
from harness.report.page.data import AXES, TITLES
from harness.report.page.text import Headings, share_label
from harness.report.page.verdict_chart import chart_of, draw_chart
from harness.report.palette import DASHES, MUTED, OTHER, of_cells
from harness.report.plots import draw_idle

_BAND_FROM = 3  # seeds
_GRAIN = 0.05  # of the axis of scores
_LEAST = 24  # letters in a panel's width
ENDINGS = (".png", ".svg", ".pdf", ".csv", "-column.pdf")
"""Endings of the files of each picture."""
PICTURES = ("verdict", "front", "curves", "staleness", "idle", "profiles", "timelines")


def draw_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Each of `PICTURES` in `folder`, as PNG, SVG and PDF, as PDF for a column, and what is drawn as CSV. Where there
    is no verdict, nothing was rewarded, or a cell is alone, there is none of it, and none from before."""
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
            "verdict": (f"{headings.heading} · {headings.how_word}", lambda _, figure: draw_chart(chart, figure))
        } | drawings
    if comparison.outcome and not (comparison.unjudged or comparison.faults) and len(comparison.cells) > 2:
        drawings["front"] = (f"Speed, lag and learning · {headings.on} · {headings.how_word}", draw_front)
    for name in PICTURES:
        for end in ENDINGS:
            (folder / f"{name}{end}").unlink(missing_ok=True)
    paths = []
    for name, (title, draw) in drawings.items():
        paths += save_in_every_format(folder, name, title, partial(draw, comparison))
        paths.append(save_for_column(folder, name, title, partial(draw, comparison)))
    return paths


def draw_curves(comparison: Comparison, figure: Figure) -> pd.DataFrame:
    """Draw what is learnt, or response length where nothing is rewarded, against samples, tokens and seconds: a panel
    each."""
    present = [curve.key for curve in comparison.curves]
    key = next((key for key in LEARNING if key in present), present[0])
    drawn, colors = [], of_cells(comparison.cells)
    for panel, (axis, label) in zip(panels(figure, len(AXES), 15, _LEAST), AXES.items(), strict=True):
        for curve in comparison.curves:
            if (curve.key, curve.axis) != (key, axis):
                continue
            color, name = colors[curve.cell], comparison.cells[curve.cell].label
            if len(curve.per_seed) >= _BAND_FROM:
                panel.fill_between(curve.grid, curve.low, curve.high, color=color, alpha=0.12, linewidth=0)
            for values in curve.per_seed.values():
                panel.plot(curve.grid, values, color=color, linewidth=0.5, alpha=0.4)
            dash = DASHES[curve.cell % len(DASHES)]
            style = (0, tuple(float(part) / 2 for part in dash.split())) if dash else "-"
            panel.plot(curve.grid, curve.mean, color=color, linewidth=1.6, linestyle=style, label=name)
            seeds = {f"seed {seed}": values for seed, values in curve.per_seed.items()}
            lines = {"at": curve.grid, "mean": curve.mean, "low": curve.low, "high": curve.high, **seeds}
            drawn.append(pd.DataFrame({"axis": axis, "label": name, **lines}))
        simulated = "simulated " if comparison.simulated and axis == "seconds" else ""
        panel.set(
            xlabel=fill(f"{simulated}{label}", _LEAST), xlim=(0, None), ylim=(0, 1.02 if key in OUTCOMES else None)
        )
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    figure.supylabel(TITLES.get(key, key), fontsize="medium", color=MUTED)
    legend_below(figure, figure.axes[0].get_legend_handles_labels()[0])
    return pd.concat(drawn, ignore_index=True)


def draw_front(comparison: Comparison, figure: Figure) -> pd.DataFrame:
    """Draw what was learnt against samples per second: a mark for each cell, with 95 % intervals, larger the staler it
    is; dotted, where there is a verdict, the Pareto front: cells that no other is ahead of in both means."""
    speed, outcome, lag = comparison.measure(SPEED), comparison.outcome, comparison.measure(LAG)
    assert speed is not None and outcome is not None and lag is not None, "what is judged has all three"
    means = [(x.value, y.value) for x, y in zip(speed.cells, outcome.cells, strict=True)]
    front = [not any(x >= own[0] and y >= own[1] and (x, y) != own for x, y in means) for own in means]
    (panel,) = panels(figure, 1, 20, _LEAST)
    colors = of_cells(comparison.cells)
    for cell, x, y, stale, color in zip(comparison.cells, speed.cells, outcome.cells, lag.cells, colors, strict=True):
        across, up = (
            None if one.interval is None else [[one.value - one.interval.low], [one.interval.high - one.value]]
            for one in (x, y)
        )
        name, size = f"{cell.label}, lag {number(stale.value)}", 4 + 1.5 * stale.value
        panel.errorbar(x.value, y.value, up, across, "o", color=color, elinewidth=1, markersize=size, label=name)
    if not comparison.withheld:
        panel.plot(*zip(*sorted(compress(means, front)), strict=True), ":", color=MUTED, zorder=1, label="front")
    panel.set(xlabel="samples per second: faster →", ylabel=TITLES[outcome.key])
    legend_below(figure, panel.get_legend_handles_labels()[0])
    labels = [cell.label for cell in comparison.cells]
    drawn = {"samples_per_s": speed, outcome.key: outcome, "lag": lag}
    values = {name: [cell.value for cell in of.cells] for name, of in drawn.items()}
    return pd.DataFrame({"label": labels, **values, "front": front})


def draw_timelines(comparison: Comparison, figure: Figure) -> pd.DataFrame:
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
    return draw_same_seconds(figure, runs)


def _panel_of_each(comparison: Comparison, figure: Figure) -> Iterator[tuple[Axes, str, str]]:
    """A panel for each cell, which has its name; the name and the colour."""
    made = panels(figure, len(comparison.cells), 11, _LEAST)
    for panel, cell, color in zip(made, comparison.cells, of_cells(comparison.cells), strict=True):
        panel.set_title(fill(cell.label, _LEAST))
        yield panel, cell.label, color


def draw_staleness(comparison: Comparison, figure: Figure) -> pd.DataFrame:
    """A histogram of worst lags per cell, all on one scale."""
    drawn = []
    for (panel, label, color), lags in zip(_panel_of_each(comparison, figure), comparison.staleness, strict=True):
        draw_lags(panel, lags, color)
        drawn.append(pd.DataFrame({"label": label, "worst_lag": lags.lags, "share": lags.shares}))
    return pd.concat(drawn, ignore_index=True)


def draw_lags(panel: Axes, lags: StalenessHistogram, color: str) -> None:
    """A bar for each worst lag: its share of the trained samples."""
    shares, names = lags.grouped()
    bars = panel.bar(names, shares, width=0.8, color=color)
    panel.bar_label(bars, [share_label(share) if share else "" for share in shares], padding=2, fontsize="small")
    panel.set(xlabel="worst lag (iterations)", ylim=(0, 1.12), yticks=(0, 0.5, 1))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.grid(axis="x", visible=False)


def draw_profiles(comparison: Comparison, figure: Figure) -> pd.DataFrame:
    """Draw the share of every cell's seeds that end above each accuracy, its interval, and the baseline in grey."""
    drawn = []
    for (panel, label, color), profile in zip(_panel_of_each(comparison, figure), comparison.profiles, strict=True):
        draw_profile(panel, profile, comparison, color)
        steps = vars(profile).items()
        turns = _turns(profile.shares, profile.low, profile.high)
        drawn.append(pd.DataFrame({"label": label, **{name: values[turns] for name, values in steps}}))
    return pd.concat(drawn, ignore_index=True)


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


def _draw_idle(comparison: Comparison, figure: Figure) -> pd.DataFrame:
    times = {cell.label: role_times(cell.timelines) for cell in comparison.cells}
    return draw_idle(figure, times, "share of the time after warm-up, mean over devices and seeds")


COLORS = "viridis"  # readable for everyone, and in grey


def draw_matrix(folder: Path, matrix: CorrectionMatrix) -> list[Path]:
    """Draw matrix.png, matrix.svg and matrix.pdf into `folder`; returns their paths."""
    title = f"{matrix.what} · {matrix.about} · measured"
    return save_in_every_format(folder, "matrix", title, lambda figure: _draw(figure, matrix))


def _draw(figure: Figure, matrix: CorrectionMatrix) -> None:
    import seaborn as sns

    places = pd.DataFrame(
        {column: [matrix.entries.get((row, column)) for row in matrix.rows] for column in matrix.columns},
        index=[f"{row}\nmean lag {lags_of(matrix, row)}" for row in matrix.rows],
        dtype=object,
    )
    if matrix.upright:
        places = places.T
    values = places.map(lambda entry: entry.measured.value if entry else math.nan).astype(float)
    figure.set_figheight(lines_high(8 + 3.6 * len(places)))
    axes, bar = figure.subplots(), {"label": "mean over seeds"}
    sns.heatmap(values, annot=places.map(_text), fmt="", cmap=COLORS, linewidths=1, cbar_kws=bar, ax=axes)
    for row, column in zip(*np.nonzero(places.isna().to_numpy()), strict=True):
        axes.text(column + 0.5, row + 0.5, "not run", ha="center", va="center")
    axes.tick_params(length=0, rotation=0)
    entries = matrix.entries.values()
    notes = ["in brackets the 95 % interval of the mean"] if any(entry.interval_text for entry in entries) else []
    notes += ["*: differs from the baseline, by seed"] if any(entry.distinguishable for entry in entries) else []
    named = "schedule" if matrix.upright else "off-policy correction"
    axes.set(xlabel="\n".join([named, *notes]), ylabel="")


def _text(entry: Entry | None) -> str:
    if not entry:
        return ""
    mark = " (baseline)" if entry.baseline else " *" if entry.distinguishable else ""
    return f"{number(entry.measured.value)}{mark}\n{entry.interval_text}".rstrip()
