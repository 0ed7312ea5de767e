"""The chart of the verdict: what each cell is against the baseline, paired by seed as the sentence is: how fast it
trains, what it learns, how stale its samples are; drawn for wide windows and pictures, and for narrow windows."""

import math
from functools import partial
from html import escape
from textwrap import fill, wrap
from typing import Any

import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.comparison.comparison import Comparison
from harness.comparison.measure_text import against, scale_of
from harness.comparison.measures import LAG, SPEED
from harness.report.drawing import inline_svg, letters_across, lines_high
from harness.report.palette import INK, MUTED, OTHER, names_of, of_cells

WIDE, NARROW = (760.0, 36.0), (330.0, 34.0)  # width in a page, and height that a cell has there, in pixels
_ABREAST = 40  # letters in the width of each panel of several, and of names
_NAME = 22  # letters in a line


def verdict_table(comparison: Comparison) -> pd.DataFrame | None:
    """A row for each panel and cell: mean, ends of its interval, and every pair; of the baseline what is no effect.
    None where there is no verdict to show: something forbids it, it is withheld, or a cell is alone. measure: what
    stands below the panel; none: no effect; value: the mean in words; best: if the verdict is for it."""
    cells, outcome = comparison.cells, None if comparison.unjudged else comparison.outcome
    speed, lag = comparison.measure(SPEED), comparison.measure(LAG)
    if comparison.faults or comparison.withheld or len(cells) == 1 or speed is None:
        return None
    if outcome is None and comparison.question != SPEED:
        return None
    rows: list[dict[str, Any]] = []
    for measure in filter(None, (speed, outcome, lag)):
        ratio, scale = measure.compared == "ratio", scale_of(measure)
        title = f"{measure.title} ({'ratio' if ratio else scale.step_unit})"
        title += ", simulated" if comparison.simulated and measure.key == SPEED else ""
        title += f", {measure.better} is better" if measure.better else ""
        panel = {"measure": title, "margin": speed.margin_text, "none": int(ratio)}
        for index, cell in enumerate(cells):
            found, told = measure.against_baseline(index), against(measure, index)
            values = {"mean": float(ratio), "low": math.nan, "high": math.nan}
            if found is not None:
                ends = (found.interval.low, found.interval.high) if found.interval.bounded else (math.nan, math.nan)
                seeds = {f"seed {seed}": value for seed, value in found.per_seed.items()}
                values = {"mean": found.interval.value, "low": ends[0], "high": ends[1], **seeds}
                values = {name: value * (1.0 if ratio else scale.factor) for name, value in values.items()}
            elif index != comparison.baseline:
                values |= {"mean": math.nan}
            rows.append(
                {
                    **panel,
                    "label": cell.label,
                    "baseline": index == comparison.baseline,
                    "best": index in comparison.best,
                    **values,
                    "significant": found is not None and found.distinguishable,
                    "value": (told.value if ratio else told.figure) + " =" * (told.verdict == "equal") if told else "",
                }
            )
    return pd.DataFrame(rows)


def caption_of(data: pd.DataFrame) -> str:
    """How to read it."""
    base, paired = data["label"][data["baseline"]].iloc[0], not data.filter(regex="^seed ").empty
    text = f"Ratios to {base} and differences from it{', paired by seed' if paired else ''}: means and 95 % intervals"
    text += ", small dots are seeds." if paired else "."
    text += " Filled: significant after Holm's correction." if data["significant"].any() else ""
    text += f" =: equal within {data['margin'].iloc[0]}." if data["value"].str.endswith("=").any() else ""
    return text + (" Bold: the cells that the verdict is for." if data["best"].any() else "")


def draw_panels(figure: Figure, data: pd.DataFrame, row: float | None = None) -> None:
    """A panel for each measure, a row for each cell, abreast where there is room. row: height of a cell, in inches;
    None: by the size of letters."""
    measures, labels = data["measure"].unique(), data["label"].unique()
    abreast = letters_across(figure) >= _ABREAST * 1.5
    shape = (1, len(measures)) if abreast else (len(measures), 1)
    height = (row or lines_high(3.3)) * len(labels) + lines_high(7)
    figure.set_figheight(height * shape[0])
    panels = figure.subplots(*shape, sharey=True, squeeze=False).ravel()
    best = data[data["best"]]["label"].to_numpy()
    for axes, (measure, of) in zip(panels, data.groupby("measure", sort=False), strict=True):
        _panel(axes, of)
        axes.set_xlabel(fill(str(measure), letters_across(figure, 0.8 / shape[1] if abreast else 0.6)))
        axes.set_yticks(range(len(labels)), [fill(label, _NAME) for label in labels])
        axes.set_ylim(len(labels) - 0.4, -0.6)
        for label, name in zip(labels, axes.get_yticklabels(), strict=False):  # shared: of the first alone
            name.set(color=INK, fontweight="bold" if label in best else "normal")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.grid(axis="y", visible=False)


def _panel(axes: Axes, data: pd.DataFrame) -> None:
    colours, size = of_cells(data["label"]), 0.65 * rcParams["font.size"]
    axes.axvline(data["none"].iloc[0], color=OTHER, linewidth=1, zorder=1, gid="none")
    for row, cell in enumerate(data.to_dict("records")):
        colour = colours[cell["label"]]
        if cell["baseline"]:
            axes.plot(cell["mean"], row, "s", color=OTHER, markersize=size, gid="baseline")
            continue
        seeds = [value for name, value in cell.items() if str(name).startswith("seed ")]
        axes.scatter(seeds, [row] * len(seeds), s=10, color=colour, alpha=0.55, zorder=2)
        axes.plot((cell["low"], cell["high"]), (row, row), color=colour, linewidth=2, zorder=2, gid="interval")
        mark: Any = {"markersize": size, "markeredgewidth": 0.25 * size}
        face = colour if cell["significant"] else "white"
        axes.plot(cell["mean"], row, "o", color=colour, markerfacecolor=face, gid="mean", **mark)
        if isinstance(cell["value"], str):
            above: Any = {"xytext": (0, 0.9 * size), "textcoords": "offset points", "ha": "center"}
            axes.annotate(cell["value"], (cell["mean"], row), size="small", gid="value", **above)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.margins(x=0.2)  # room for figures


def chart_html(comparison: Comparison) -> str:
    """Drawn twice, for wide windows and for narrow ones, of which one is shown; empty where there is no verdict."""
    data = verdict_table(comparison)
    if data is None:
        return ""
    held = data.assign(told=data["measure"] + " " + data["value"])[~data["baseline"]]
    words = ". ".join(f"{label}: {', '.join(rows['told'])}" for label, rows in held.groupby("label", sort=False))
    colours = dict(zip(of_cells(data["label"]).values(), names_of(comparison.cells), strict=True))
    svgs = "".join(
        inline_svg(partial(draw_panels, data=data, row=row / 72), (width, width), name, words, colours)
        for name, (width, row) in (("wide-one", WIDE), ("narrow-one", NARROW))
    )
    caption = escape(caption_of(data))
    return f'<figure class="verdict-chart">{svgs}<figcaption class="caption">{caption}</figcaption></figure>'


def draw_verdict(figure: Figure, data: pd.DataFrame) -> None:
    """The same as a picture, with its caption."""
    draw_panels(figure, data)
    caption = wrap(caption_of(data), letters_across(figure, 1.2))
    figure.set_figheight(figure.get_figheight() + lines_high(2 + len(caption)))  # and the title
    figure.supxlabel("\n".join(caption), fontsize="small", color=MUTED)
