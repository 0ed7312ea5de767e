"""The chart of the verdict: what each cell is against the baseline, paired by seed as the sentence is: how fast it
trains, what it learns, how stale its samples are; drawn for wide windows and pictures, and for narrow windows."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from harness.comparison.measures import LAG, SPEED, Measure
from harness.report.drawing import inline_svg, letters_across, lines_high
from harness.report.palette import INK, MUTED, OTHER, names_of, of_cells

WIDE, NARROW = (760.0, 36.0), (330.0, 34.0)
"""Width in a page, and height that a cell has there, in pixels."""
_ABREAST = 40  # letters in the width of each panel of several, and of names
_NAME = 22  # letters in a line


@dataclass(frozen=True)
class VerdictChart:
    """A panel for each measure, a row for each cell."""

    comparison: Comparison
    measures: tuple[Measure, ...]

    @property
    def drawn(self) -> pd.DataFrame:
        """A row for each panel and cell but the baseline: mean, ends of its interval, and every pair, as drawn."""
        rows = []
        for measure in self.measures:
            factor = 1.0 if measure.compared == "ratio" else scale_of(measure).factor
            for index, cell in enumerate(self.comparison.cells):
                if (found := measure.against_baseline(index)) is not None:
                    ends = (found.interval.low, found.interval.high) if found.interval.bounded else (math.nan, math.nan)
                    values = {"mean": found.interval.value, "low": ends[0], "high": ends[1]}
                    values |= {f"seed {seed}": value for seed, value in found.per_seed.items()}
                    scaled = {name: factor * value for name, value in values.items()}
                    named = {"measure": measure.key, "label": cell.label, "significant": found.distinguishable}
                    rows.append(named | scaled)
        return pd.DataFrame(rows)

    @property
    def caption(self) -> str:
        """How to read it."""
        base, drawn = self.comparison.cells[self.comparison.baseline].label, self.drawn
        paired = any(str(name).startswith("seed ") for name in drawn)
        text = (
            f"Ratios to {base} and differences from it{', paired by seed' if paired else ''}: means and 95 % intervals"
        )
        text += ", small dots are seeds." if paired else "."
        text += " Filled: significant after Holm's correction." if drawn["significant"].any() else ""
        return text + (" Bold: the cells that the verdict is for." if self.comparison.best else "")

    @property
    def words(self) -> str:
        """The same for those who cannot see it."""
        parts = []
        for index, cell in enumerate(self.comparison.cells):
            held = ((measure, against(measure, index)) for measure in self.measures)
            told = [f"{measure.title} {one.value} {one.bounds}" for measure, one in held if one]
            parts.append(f"{cell.label}: {', '.join(told) or 'baseline'}")
        return ". ".join(parts)

    def draw(self, figure: Figure, row: float | None = None) -> pd.DataFrame:
        """Draw into the figure's width, panels abreast where there is room. row: of a cell, in inches; None: by the
        size of letters."""
        cells, drawn = self.comparison.cells, self.drawn
        abreast = letters_across(figure) >= _ABREAST * 1.5
        shape = (1, len(self.measures)) if abreast else (len(self.measures), 1)
        height = (row or lines_high(3.3)) * len(cells) + lines_high(7)
        figure.set_figheight(height * shape[0])
        panels = figure.subplots(*shape, sharey=True, squeeze=False).ravel()
        for axes, measure in zip(panels, self.measures, strict=True):
            share = 0.8 / shape[1] if abreast else 0.6
            self._panel(axes, measure, drawn[drawn["measure"] == measure.key], letters_across(figure, share))
            axes.set_yticks(range(len(cells)), [fill(cell.label, _NAME) for cell in cells])
            axes.set_ylim(len(cells) - 0.4, -0.6)
            for index, name in enumerate(axes.get_yticklabels()):
                name.set(color=INK, fontweight="bold" if index in self.comparison.best else "normal")
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.grid(axis="y", visible=False)
        return drawn

    def _panel(self, axes: Axes, measure: Measure, drawn: pd.DataFrame, letters: int) -> None:
        cells, ratio = self.comparison.cells, measure.compared == "ratio"
        colours = dict(zip((cell.label for cell in cells), of_cells(cells), strict=True))
        rows = {cell.label: place for place, cell in enumerate(cells)}
        size = 0.65 * rcParams["font.size"]
        axes.axvline(float(ratio), color=OTHER, linewidth=1, zorder=1, gid="none")
        axes.plot(float(ratio), self.comparison.baseline, "s", color=OTHER, markersize=size, gid="baseline")
        pairs = drawn.filter(regex="^seed ").assign(row=drawn["label"].map(rows), label=drawn["label"])
        dots = pairs.melt(["row", "label"], value_name="value").dropna()
        axes.scatter(dots["value"], dots["row"], s=10, c=dots["label"].map(colours), alpha=0.55, zorder=2)
        for one in drawn.to_dict("records"):
            colour, row = colours[one["label"]], rows[one["label"]]
            axes.plot((one["low"], one["high"]), (row, row), color=colour, linewidth=2, zorder=2, gid="interval")
            mark: Any = {"markersize": size, "markeredgewidth": 0.25 * size}
            face = colour if one["significant"] else "white"
            axes.plot(one["mean"], row, "o", color=colour, markerfacecolor=face, gid="mean", **mark)
            if (told := against(measure, row)) is not None:
                above: Any = {"xytext": (0, 0.9 * size), "textcoords": "offset points", "ha": "center"}
                axes.annotate(
                    told.value if ratio else told.figure, (one["mean"], row), size="small", gid="value", **above
                )
        unit = "ratio" if ratio else scale_of(measure).step_unit
        simulated = ", simulated" if self.comparison.simulated and measure.key == SPEED else ""
        better = f", {measure.better} is better" if measure.better else ""
        axes.set(xlabel=fill(f"{measure.title} ({unit}){simulated}{better}", letters), ylabel="")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.margins(x=0.2)  # room for figures


def chart_of(comparison: Comparison) -> VerdictChart | None:
    """None where there is no verdict to show: something forbids it, it is withheld, or a cell is alone."""
    up = None if comparison.unjudged else comparison.outcome
    speed, lag = comparison.measure(SPEED), comparison.measure(LAG)
    if comparison.faults or comparison.withheld or len(comparison.cells) == 1 or speed is None:
        return None
    if up is None and comparison.question != SPEED:
        return None
    return VerdictChart(comparison, tuple(measure for measure in (speed, up, lag) if measure is not None))


def chart_html(chart: VerdictChart) -> str:
    """Twice, for wide windows and for narrow ones, of which one is shown."""
    cells = chart.comparison.cells
    colours = dict(zip(of_cells(cells), names_of(cells), strict=True))
    svgs = "".join(
        inline_svg(partial(chart.draw, row=row / 72), (width, width), name, chart.words, colours)
        for name, (width, row) in (("wide-one", WIDE), ("narrow-one", NARROW))
    )
    return (
        f'<figure class="verdict-chart">{svgs}<figcaption class="caption">{escape(chart.caption)}</figcaption></figure>'
    )


def draw_chart(chart: VerdictChart, figure: Figure) -> pd.DataFrame:
    """The same as a picture, with its caption."""
    drawn = chart.draw(figure)
    caption = wrap(chart.caption, letters_across(figure, 1.2))
    figure.set_figheight(figure.get_figheight() + lines_high(2 + len(caption)))  # and the title
    figure.supxlabel("\n".join(caption), fontsize="small", color=MUTED)
    return drawn
