"""The pictures of a comparison, in the page's colours, and the matrix of schedules and corrections as a heat map: of
each the table that it is drawn from, and what draws it."""

import math
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from harness.comparison.comparison import Comparison
from harness.comparison.correction_matrix import WIDEST, CorrectionMatrix, as_frame, lags_text
from harness.comparison.curves import LEARNING, StalenessHistogram, role_times
from harness.comparison.measures import LAG, OUTCOMES, SPEED
from harness.comparison.statistics import Interval
from harness.metrics.formatting import number
from harness.report.drawing import DrawTable, legend_below, letters_across, lines_high, panels, save_in_every_format
from harness.report.gantt import data_versions, draw_same_seconds, same_seconds
from harness.report.page.data import AXES, TITLES
from harness.report.page.text import Headings
from harness.report.page.verdict_chart import draw_verdict, verdict_table
from harness.report.palette import DASHES, MUTED, OTHER, of_cells
from harness.report.plots import draw_idle, draw_lags, idle_times

_BAND_FROM = 3  # seeds
_GRAIN = 0.05  # of the axis of scores
_LEAST = 24  # letters in a panel's width
_FIELD = 16  # letters in a field of a matrix
_PLACES = 51  # along a curve
ENDINGS = (".png", ".svg", ".pdf", "-column.pdf", ".csv")  # endings of the files of each picture


def draw_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Each of `PICTURES` in `folder`, as PNG, SVG and PDF, as PDF for a column, and what is drawn as CSV. Where there
    is no verdict, nothing was rewarded, or a cell is alone, there is none of it, and none from before."""
    headings = Headings(comparison)
    on = f"{headings.on} · {headings.how_word}"
    titles = {
        "verdict": f"{headings.heading} · {headings.how_word}",
        "front": f"Speed, lag and learning · {on}",
        "curves": f"{headings.curves_title} · {on}",
        "staleness": f"Staleness · {on}",
        "idle": f"Idle time · {on}",
        "profiles": f"Performance profiles · {on}",
        "timelines": f"The same seconds · {on}",
    }
    for name in PICTURES:
        for end in ENDINGS:
            (folder / f"{name}{end}").unlink(missing_ok=True)
    paths = []
    for name, (table, draw) in _PICTURES.items():
        if (data := table(comparison)) is not None:
            paths += save_in_every_format(folder, name, titles[name], draw, data)
    return paths


def _curves(comparison: Comparison) -> pd.DataFrame:
    """A row for each axis, cell and place: what is learnt, or response length where nothing is rewarded."""
    present = [curve.key for curve in comparison.curves]
    key = next((key for key in LEARNING if key in present), present[0])
    rows = []
    for axis, title in AXES.items():
        simulated = "simulated " if comparison.simulated and axis == "seconds" else ""
        for curve in comparison.curves:
            if (curve.key, curve.axis) == (key, axis):
                named = {"measure": key, "axis": f"{simulated}{title}", "label": comparison.cells[curve.cell].label}
                seeds = {f"seed {seed}": values for seed, values in curve.per_seed.items()}
                lines = {"at": curve.grid, "mean": curve.mean, "low": curve.low, "high": curve.high, **seeds}
                thin = np.linspace(0, len(curve.grid) - 1, min(len(curve.grid), _PLACES)).round().astype(int)
                rows.append(pd.DataFrame({**named, **lines}).iloc[thin])
    return pd.concat(rows, ignore_index=True)


def draw_curves(figure: Figure, data: pd.DataFrame) -> None:
    """A panel for each axis: means, bands of their intervals, and every seed."""
    axes, key = data["axis"].unique(), data["measure"].iloc[0]
    colors = of_cells(data["label"].unique())
    dashes = dict(zip(colors, cycle(DASHES), strict=False))
    least = data.filter(regex="^(mean|seed )").min().min()
    heights = (math.floor(10 * least) / 10, 1.02) if key in OUTCOMES else (0, None)
    for panel, (axis, of_axis) in zip(
        panels(figure, len(axes), 15, _LEAST), data.groupby("axis", sort=False), strict=True
    ):
        for name, curve in of_axis.groupby("label", sort=False):
            label = str(name)
            color, seeds = colors[label], curve.filter(regex="^seed ").dropna(axis="columns", how="all")
            if seeds.shape[1] >= _BAND_FROM:
                panel.fill_between(curve["at"], curve["low"], curve["high"], color=color, alpha=0.12, linewidth=0)
            panel.plot(curve["at"], seeds, color=color, linewidth=0.5, alpha=0.4)
            style = (0, tuple(float(part) / 2 for part in dashes[label].split())) if dashes[label] else "-"
            panel.plot(curve["at"], curve["mean"], color=color, linewidth=1.6, linestyle=style, label=label)
        panel.set(xlabel=fill(str(axis), _LEAST), xlim=(0, None), ylim=heights)
        panel.xaxis.set_major_locator(MaxNLocator(3))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    figure.supylabel(TITLES.get(key, key), fontsize="medium", color=MUTED)
    legend_below(figure, figure.axes[0].get_legend_handles_labels()[0])


def _front(comparison: Comparison) -> pd.DataFrame | None:
    """Speed, lag and what was learnt, of three cells or more. front: where there is a verdict, whether no other cell is
    ahead in both means."""
    speed, outcome, lag = comparison.measure(SPEED), comparison.outcome, comparison.measure(LAG)
    if outcome is None or comparison.unjudged or comparison.faults or len(comparison.cells) < 3:
        return None
    assert speed is not None and lag is not None, "what is judged has both"
    found: dict[str, Any] = {"label": [cell.label for cell in comparison.cells], "measure": outcome.key}
    for name, measure in (("samples_per_s", speed), ("learnt", outcome)):
        ends = [each.interval or Interval(each.value, math.nan, math.nan) for each in measure.cells]
        found |= {name: [each.value for each in measure.cells]}
        found |= {f"{name}_{end}": [getattr(each, end) for each in ends] for end in ("low", "high")}
    means = [*zip(found["samples_per_s"], found["learnt"], strict=True)]
    front = [not any(x >= own[0] and y >= own[1] and (x, y) != own for x, y in means) for own in means]
    found |= {"lag": [each.value for each in lag.cells], "front": [not comparison.withheld and own for own in front]}
    return pd.DataFrame(found)


def draw_front(figure: Figure, data: pd.DataFrame) -> None:
    """Draw what was learnt against samples/s: a mark per cell, larger if stale, with intervals; dotted the front."""
    (panel,) = panels(figure, 1, 20, _LEAST)
    colors = of_cells(data["label"])
    cells: list[Any] = [*data.itertuples()]
    for cell in cells:
        across, up = (
            np.abs([[getattr(cell, f"{name}_{end}") - getattr(cell, name)] for end in ("low", "high")])
            for name in ("samples_per_s", "learnt")
        )
        name, size = f"{cell.label}, lag {number(cell.lag)}", 4 + 1.5 * cell.lag
        marks: Any = {"color": colors[cell.label], "elinewidth": 1, "markersize": size, "label": name}
        panel.errorbar(cell.samples_per_s, cell.learnt, up, across, "o", **marks)
    if (front := data[data["front"]].sort_values("samples_per_s")).size:
        panel.plot(front["samples_per_s"], front["learnt"], ":", color=MUTED, zorder=1, label="front")
    panel.set(xlabel="samples per second: faster →", ylabel=TITLES[data["measure"].iloc[0]])
    legend_below(figure, panel.get_legend_handles_labels()[0])


def _timelines(comparison: Comparison) -> pd.DataFrame | None:
    """The first runs of the baseline, and of the fastest of the others, over the same seconds."""
    others = [index for index in range(len(comparison.cells)) if index != comparison.baseline]
    if not others:
        return None
    speed = comparison.measure(SPEED)
    assert speed is not None, "every run has a speed"
    fastest = max(others, key=lambda index: speed.cells[index].value)
    cells = [comparison.cells[index] for index in (comparison.baseline, fastest)]
    runs = {cell.label: cell.runs[0] for cell in cells}
    return same_seconds({name: (run.timeline, data_versions(run.timeline, run.samples)) for name, run in runs.items()})


def _panels_of_cells(figure: Figure, data: pd.DataFrame) -> Iterator[tuple[Axes, pd.DataFrame, str]]:
    """A panel for each cell, which has its name; its rows and its colour."""
    colors = of_cells(data["label"].unique())
    for panel, (label, rows) in zip(
        panels(figure, len(colors), 11, _LEAST), data.groupby("label", sort=False), strict=True
    ):
        panel.set_title(fill(str(label), _LEAST))
        yield panel, rows, colors[str(label)]


def _staleness(comparison: Comparison) -> pd.DataFrame:
    """Shares of trained samples by their worst lag."""
    rows = zip(comparison.cells, comparison.staleness, strict=True)
    return pd.concat(
        [pd.DataFrame({"label": cell.label, "worst_lag": of.lags, "share": of.shares}) for cell, of in rows]
    )


def draw_staleness(figure: Figure, data: pd.DataFrame) -> None:
    """A histogram of worst lags per cell, all on one scale."""
    for panel, rows, color in _panels_of_cells(figure, data):
        draw_lags(panel, StalenessHistogram(rows["worst_lag"].to_numpy(), rows["share"].to_numpy()), color)


def profiles(comparison: Comparison) -> pd.DataFrame | None:
    """Shares of each cell's seeds that end above a score, with intervals, where any of them turns."""
    if comparison.outcome is None or not comparison.profiles:
        return None
    rows = []
    for index, (cell, profile) in enumerate(zip(comparison.cells, comparison.profiles, strict=True)):
        lines = pd.DataFrame(vars(profile))
        turns = lines.drop(columns="taus").diff().ne(0).any(axis="columns")
        turns.iloc[-1] = True
        is_base, key = index == comparison.baseline, comparison.outcome.key
        rows.append(lines[turns].assign(measure=key, label=cell.label, baseline=is_base))
    return pd.concat(rows, ignore_index=True)


def draw_profiles(figure: Figure, data: pd.DataFrame) -> None:
    """A panel for each cell: its steps, their interval, and the baseline in grey."""
    for panel, rows, color in _panels_of_cells(figure, data):
        draw_profile(panel, rows, data, color)


def draw_profile(panel: Axes, own: pd.DataFrame, data: pd.DataFrame, color: str) -> None:
    """A cell's steps and their band, the baseline's behind, over the scores in which any cell's seeds end."""
    panel.fill_between(own["taus"], own["low"], own["high"], step="post", color=color, alpha=0.13, linewidth=0)
    for of, stroke, width in ((data[data["baseline"]], OTHER, 1.0), (own, color, 2.2)):
        panel.step(of["taus"], of["shares"], where="post", color=stroke, linewidth=width)
    scores = score_range(data)
    panel.set(xlabel=fill(TITLES[data["measure"].iloc[0]], _LEAST), xlim=scores, ylim=(0, 1.04), yticks=(0, 0.5, 1))
    panel.set_xticks(ticks := np.linspace(*scores, 3), [f"{score:.3g}" for score in ticks])
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def score_range(data: pd.DataFrame) -> tuple[float, float]:
    """The part of the scores in which the seeds of any cell end, with some room."""
    low, high = data[data["shares"] < 1]["taus"].min(), data[data["shares"] <= 0].groupby("label")["taus"].min().max()
    grains = np.floor(low / _GRAIN - 0.2), np.ceil(high / _GRAIN + 0.2)
    least, most = (float(np.clip(grain * _GRAIN, 0.0, 1.0)) for grain in grains)
    return least, most


def _idle(comparison: Comparison) -> pd.DataFrame:
    return idle_times({cell.label: role_times(cell.timelines) for cell in comparison.cells})


_PICTURES: dict[str, tuple[Callable[[Comparison], pd.DataFrame | None], DrawTable]] = {
    "verdict": (verdict_table, draw_verdict),
    "front": (_front, draw_front),
    "curves": (_curves, draw_curves),
    "staleness": (_staleness, draw_staleness),
    "idle": (_idle, draw_idle),
    "profiles": (profiles, draw_profiles),
    "timelines": (_timelines, draw_same_seconds),
}
PICTURES = tuple(_PICTURES)


COLORS = "viridis"  # readable for everyone, and in grey


def draw_matrix(folder: Path, matrix: CorrectionMatrix) -> list[Path]:
    """Draw matrix.png, matrix.svg and matrix.pdf into `folder`, and write matrix.csv; returns their paths."""
    title = f"{matrix.what} · {matrix.about} · measured"
    return save_in_every_format(folder, "matrix", title, draw_cells_of_matrix, as_frame(matrix))


def draw_cells_of_matrix(figure: Figure, data: pd.DataFrame) -> None:
    """A field for each schedule under each correction, coloured by its mean."""
    import seaborn as sns

    marks = data["differs"].astype(str).str.lower().map({"baseline": " (baseline)", "true": " *"}).fillna("")
    ends = zip(data["low"], data["high"], strict=True)
    intervals = [f"\n[{number(low)}, {number(high)}]" if math.isfinite(low) else "" for low, high in ends]
    lags = data.groupby("schedule")["lag"].agg(lambda lags: f"\nmean lag {lags_text(lags)}")
    named = data["schedule"] + data["schedule"].map(lags)
    told = data.assign(text=data["mean"].map(number) + marks + intervals, schedule=named)
    values, texts = (
        told.pivot(index="schedule", columns="correction", values=of).reindex(
            index=told["schedule"].unique(), columns=told["correction"].unique()
        )
        for of in ("mean", "text")
    )
    upright = len(values.columns) > min(WIDEST, letters_across(figure, 0.8) // _FIELD)
    if upright:
        values, texts = values.T, texts.T
    beside = max(len(line) for name in values.index for line in str(name).splitlines())
    across = (letters_across(figure) - beside) // len(values.columns)
    figure.set_figheight(lines_high(9 + 3.6 * len(values)))
    axes = figure.subplots()
    fits = {"fontsize": rcParams["font.size"] * min(1.0, across / _FIELD)}
    sns.heatmap(values, annot=texts, fmt="", cmap=COLORS, linewidths=1, cbar=False, annot_kws=fits, ax=axes)
    words = (
        "\n".join(fill(line, across, break_long_words=False) for line in str(name).splitlines()) for name in values
    )
    axes.set_xticklabels(words, **fits)
    for row, column in zip(*np.nonzero(values.isna().to_numpy()), strict=True):
        axes.text(column + 0.5, row + 0.5, "not run", ha="center", va="center")
    axes.tick_params(length=0, rotation=0)
    notes = ["in brackets the 95 % interval of the mean"] if np.isfinite(data["low"]).any() else []
    notes += ["*: significantly different from the baseline, paired by seed"] if marks.eq(" *").any() else []
    below = ["schedule" if upright else "off-policy correction", *notes]
    axes.set(xlabel="\n".join(fill(line, letters_across(figure, 0.7)) for line in below), ylabel="")


DRAWINGS: dict[DrawTable, frozenset[str]] = {
    draw_verdict: frozenset({"none", "value", "significant"}),
    draw_front: frozenset({"samples_per_s", "learnt", "lag", "front"}),
    draw_curves: frozenset({"axis", "label", "at", "mean"}),
    draw_staleness: frozenset({"label", "worst_lag", "share"}),
    draw_idle: frozenset({"label", "role", "own", "others", "idle"}),
    draw_profiles: frozenset({"label", "taus", "shares"}),
    draw_same_seconds: frozenset({"label", "kind", "start", "end", "data"}),
    draw_cells_of_matrix: frozenset({"schedule", "correction", "lag", "differs"}),
}
"""Columns by which the table of each picture is known."""
