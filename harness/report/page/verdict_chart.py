"""The chart of the verdict: how fast each cell trains against what it learns, with both intervals, and how stale its
samples are; drawn for wide windows and pictures, and for narrow windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D, Transform

from harness.comparison.comparison import Comparison
from harness.comparison.measure_text import against, scale_of, titled
from harness.comparison.measures import LAG, OUTCOMES, SPEED, Measure
from harness.comparison.statistics import Interval
from harness.report.palette import GRID, INK, MUTED, names_of, of_cells
from harness.report.plots import inline_svg

WIDE, NARROW = (900.0, 340.0), (362.0, 400.0)
"""Width and height: of pixels in a page, of points in a picture."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 68.0, 14.0, 12.0, 44.0
_HEAD, _FOOT = 30.0, 36.0  # of a picture, for the title and for the caption
_SPARE = 0.09  # of an axis, at both ends
_LEAST_SHARE = 0.1  # of accuracies: noise fills no chart
_NAME, _NOTE, _LINE = 7.3, 6.0, 14.0  # a letter's width, and a line's height
_FAR = 12.0  # from a mark, from where on a line leads to its label
_CAPTION = 150  # letters in a line of a picture
_TICKS, _TITLES, _NOTES = 12.0, 12.5, 11.5  # sizes of letters


@dataclass(frozen=True)
class VerdictChart:
    """Speed against learning. across: how fast; up: what is learnt, or how stale samples are where nothing is
    rewarded."""

    comparison: Comparison
    across: Measure
    up: Measure

    @property
    def caption(self) -> str:
        """How to read it."""
        base = self.comparison.cells[self.comparison.baseline].label
        text = f"Means with their 95 % intervals. The square, and the dashed lines through it, are {base}. "
        if self.up.key in OUTCOMES:
            text += "The larger a mark, the staler its samples (mean lag in iterations). "
        if len(self.front) > 1:
            text += "Dotted: the front, cells that no other is ahead of in both means. "
        of_speed = self.comparison.question == SPEED
        if not self.comparison.best:
            return f"{text}None is filled: none is significantly {'faster' if of_speed else 'higher'} than {base}."
        filled = f"what is significantly higher than {base}"
        if of_speed:
            filled = "the fastest, and what does not differ significantly from it"
        return f"{text}Filled: {filled}."

    @property
    def words(self) -> str:
        """The same for those who cannot see it."""
        parts = []
        for index, cell in enumerate(self.comparison.cells):
            values = (
                f"{titled(measure)} {scale_of(measure).value(measure.cells[index].value)} "
                f"{scale_of(measure).bounds(measure.cells[index].interval)}"
                for measure in (self.across, self.up)
            )
            parts.append(f"{cell.label}: {', '.join(values)}, {self._note(index)}")
        return ". ".join(parts)

    @property
    def front(self) -> list[int]:
        """Cells that no other is ahead of in one mean, and not behind in the other, slowest first; none where nothing
        is rewarded."""
        if self.up.key not in OUTCOMES:
            return []
        means = [(across.value, up.value) for across, up in self._values]
        behind = {one for one in means for x, y in means if x >= one[0] and y >= one[1] and (x, y) != one}
        return sorted((index for index, one in enumerate(means) if one not in behind), key=lambda index: means[index])

    def draw(self, size: tuple[float, float], figure: Figure, head: float = 0.0, foot: float = 0.0) -> None:
        """Draw into the whole figure. head, foot: points for a title and a caption."""
        width, height = size[0], head + size[1] + foot
        figure.set_layout_engine("none")  # labels are placed by the size that it has
        figure.set_size_inches(width / 72, height / 72)
        frame = Box(_LEFT, head + _TOP, width - _RIGHT, height - foot - _BOTTOM)
        axes = figure.add_axes(
            (frame.left / width, 1 - frame.bottom / height, frame.width / width, frame.height / height)
        )
        axes.spines[:].set_visible(False)
        axes.grid(color=GRID, linewidth=1.0)
        axes.tick_params(length=0, pad=6, labelsize=_TICKS, labelcolor=MUTED)
        axes.set(xlim=_limits(self.across), ylim=_limits(self.up))
        _set_ticks(axes.xaxis, max(3, int(width / 130)))
        _set_ticks(axes.yaxis, 5)
        simulated = ", simulated" if self.comparison.simulated else ""
        better = "higher is better" if self.up.better else "how stale samples are"
        axes.set_xlabel(f"samples per second{simulated}: faster →", loc="right", fontsize=_TITLES, color=INK)
        axes.set_ylabel(f"{titled(self.up)}:\n{better}", fontsize=_TITLES, color=INK)  # in one line it is cut off
        base, colours = self._values[self.comparison.baseline], of_cells(self.comparison.cells)
        dashed: dict[str, Any] = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (4, 4)), "zorder": 1}
        axes.axvline(base[0].value, **dashed)
        axes.axhline(base[1].value, **dashed)
        ahead = [self._values[index] for index in self.front]
        dotted: dict[str, Any] = {"color": MUTED, "linewidth": 1.6, "linestyle": ":", "zorder": 1, "gid": "front"}
        axes.plot([across.value for across, _ in ahead], [up.value for _, up in ahead], **dotted)
        for (across, up), colour in zip(self._values, colours, strict=True):
            bar: dict[str, Any] = {"color": colour, "linewidth": 1.9, "alpha": 0.75, "zorder": 2, "gid": "bar"}
            if across.bounded:
                axes.plot((across.low, across.high), (up.value, up.value), **bar)
            if up.bounded:
                axes.plot((across.value, across.value), (up.low, up.high), **bar)
        for index in sorted(range(len(colours)), key=self._radius, reverse=True):  # small ones over large ones
            self._mark(axes, index, colours[index])
        inches = Affine2D().scale(1 / 72, -1 / 72).translate(0, height / 72)
        self._label(axes, frame, inches + figure.dpi_scale_trans, colours)

    def _mark(self, axes: Axes, index: int, colour: str) -> None:
        """Filled: a cell that the verdict is for; square: the baseline."""
        across, up = self._values[index]
        axes.plot(
            across.value,
            up.value,
            "s" if index == self.comparison.baseline else "o",
            markersize=2 * self._radius(index),
            markeredgewidth=2.3,
            color=colour,
            markerfacecolor=colour if index in self.comparison.best else "white",
            zorder=3,
            gid=f"mark {index}",
        )

    def _label(self, axes: Axes, frame: Box, points: Transform, colours: list[str]) -> None:
        """A name and a note beside each mark, and a line to those that are far from it. frame, points: from the upper
        left corner."""

        def place(across: float, up: float) -> tuple[float, float]:
            x, y = (axes.transLimits + Affine2D().scale(frame.width, frame.height)).transform((across, up))
            return frame.left + x, frame.bottom - y

        middles = [place(across.value, up.value) for across, up in self._values]
        marks = [Box.around(x, y, self._radius(index) + 2) for index, (x, y) in enumerate(middles)]
        base_x, base_y = middles[self.comparison.baseline]
        lines = [Box.of_line(base_x, frame.top, base_x, frame.bottom)]
        lines += [Box.of_line(frame.left, base_y, frame.right, base_y)]
        for across, up in self._values:
            if across.bounded:
                lines.append(Box.of_line(*place(across.low, up.value), *place(across.high, up.value)))
            if up.bounded:
                lines.append(Box.of_line(*place(across.value, up.low), *place(across.value, up.high)))
        names = [cell.label for cell in self.comparison.cells]
        notes = list(map(self._note, range(len(names))))
        wide = [max(_NAME * len(name), _NOTE * len(note)) for name, note in zip(names, notes, strict=True)]
        text = partial(axes.text, transform=points, path_effects=[withStroke(linewidth=3, foreground="white")])
        for index, box in enumerate(places(marks, [(each, 2 * _LINE) for each in wide], frame, lines)):
            middle = middles[index]
            near = box.nearest(*middle)
            if math.dist(near, middle) > self._radius(index) + _FAR:
                leader = Line2D(*zip(middle, near, strict=True), color=colours[index], transform=points, zorder=2)
                leader.set(linewidth=0.9, alpha=0.75)
                axes.add_line(leader)
            side, x = ("right", box.right) if box.right < middle[0] else ("left", box.left)
            text(x, box.top + 11, names[index], ha=side, fontsize=_TITLES, color=INK, fontweight="bold", gid="name")
            text(x, box.top + 24, notes[index], ha=side, fontsize=_NOTES, color=MUTED, gid="note")

    @property
    def _values(self) -> list[tuple[Interval, Interval]]:
        """Intervals across and up, as written on the axes; one without bounds where there are none."""
        return [(_interval(self.across, index), _interval(self.up, index)) for index in range(len(self.across.cells))]

    def _radius(self, index: int) -> float:
        return 5.0 + 2.2 * math.sqrt(self._lag(index))

    def _lag(self, index: int) -> float:
        measure = self.comparison.measure(LAG)
        return measure.cells[index].value if measure is not None else 0.0

    def _note(self, index: int) -> str:
        """A line on the cell, in the words of the tables; and its lag."""
        parts = ["baseline"] if index == self.comparison.baseline else []
        question = self.comparison.measure(self.comparison.question)
        found = against(question, index) if question is not None else None
        if found is not None:
            parts.append(found.value if found.called else found.word)
        learnt = against(self.up, index)
        if self.comparison.question == SPEED and learnt is not None and learnt.verdict in ("better", "worse"):
            parts.append(learnt.value)
        measure = self.comparison.measure(LAG)
        if measure is not None:
            parts.append(f"lag {scale_of(measure).value(self._lag(index))}")
        return " · ".join(parts)


def chart_of(comparison: Comparison) -> VerdictChart | None:
    """None where there is no verdict to show: something forbids it, it is withheld, or a cell is alone."""
    up = None if comparison.unjudged else comparison.outcome
    if up is None and comparison.question == SPEED:
        up = comparison.measure(LAG)
    across = comparison.measure(SPEED)
    if comparison.faults or comparison.withheld or len(comparison.cells) == 1 or across is None or up is None:
        return None
    return VerdictChart(comparison, across, up)


def _interval(measure: Measure, index: int) -> Interval:
    cell, factor = measure.cells[index], scale_of(measure).factor
    interval = cell.interval or Interval(cell.value, -math.inf, math.inf)
    return Interval(factor * interval.value, factor * interval.low, factor * interval.high)


def _limits(measure: Measure) -> tuple[float, float]:
    """The ends of its axis; a share's is never narrower than some points."""
    intervals = [_interval(measure, index) for index in range(len(measure.cells))]
    values = [i.value for i in intervals] + [b for i in intervals if i.bounded for b in (i.low, i.high)]
    low, high = min(values), max(values)
    least = _LEAST_SHARE * scale_of(measure).factor if measure.key in OUTCOMES else 0.2 * abs(high) or 1.0
    lacking = max(0.0, least - (high - low)) / 2
    spare = _SPARE * max(high - low, least)
    return low - lacking - spare, high + lacking + spare


def _set_ticks(axis: Axis, most: int) -> None:
    """Ticks of an axis, none below zero."""
    low, high = axis.get_view_interval()
    values = [float(value) for value in MaxNLocator(most).tick_values(low, high) if max(low, 0) <= value <= high]
    axis.set_ticks(values, [f"{value:,.12g}" for value in values])


def chart_html(chart: VerdictChart) -> str:
    """Twice, for wide windows and for narrow ones, of which one is shown."""
    cells = chart.comparison.cells
    colours = dict(zip(of_cells(cells), names_of(cells), strict=True))
    svgs = "".join(
        inline_svg(partial(chart.draw, size), size, name, chart.words, colours)
        for name, size in (("wide-one", WIDE), ("narrow-one", NARROW))
    )
    return (
        f'<figure class="verdict-chart">{svgs}<figcaption class="caption">{escape(chart.caption)}</figcaption></figure>'
    )


def draw_chart(chart: VerdictChart, figure: Figure) -> None:
    """The same as a picture, with its caption."""
    chart.draw(WIDE, figure, _HEAD, _FOOT)
    width, whole = WIDE[0], _HEAD + WIDE[1] + _FOOT
    caption = fill(chart.caption, _CAPTION)
    figure.text(_LEFT / width, _FOOT / whole, caption, va="top", fontsize=9, color=MUTED)


_GAPS = (4.0, 16.0, 34.0, 56.0, 84.0)  # from the mark to its label
_DIRECTIONS = 16
_FURTHER, _ASTRAY = 3.0, 60.0  # what a unit of length costs: from its mark, and nearer to another than to its own
_OVER_LINE = 4.0  # and of area, where nothing is hidden


@dataclass(frozen=True)
class Box:
    """A rectangle in the plane, from the upper left corner."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """Length from left to right."""
        return self.right - self.left

    @property
    def height(self) -> float:
        """Length from top to bottom."""
        return self.bottom - self.top

    @staticmethod
    def around(x: float, y: float, radius: float) -> Box:
        """The square around a point."""
        return Box(x - radius, y - radius, x + radius, y + radius)

    @staticmethod
    def of_line(x1: float, y1: float, x2: float, y2: float) -> Box:
        """The rectangle around a line along an axis."""
        return Box(min(x1, x2) - 1, min(y1, y2) - 1, max(x1, x2) + 1, max(y1, y2) + 1)

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(wide, 0.0) * max(high, 0.0)

    def inside(self, other: Box) -> bool:
        """Whether it lies inside of the other."""
        within_x = other.left <= self.left and self.right <= other.right
        return within_x and other.top <= self.top and self.bottom <= other.bottom

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the rectangle that is nearest to this one."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)


def places(marks: Sequence[Box], sizes: Sequence[tuple[float, float]], frame: Box, lines: Sequence[Box]) -> list[Box]:
    """A box for the label of each mark, (width, height) in `sizes`, as near to it as it can be within the frame; those
    of marks in a crowd are placed first."""
    crowded = [sum(1 / (1 + _distance(mark, other)) for other in marks) for mark in marks]
    placed: dict[int, Box] = {}
    for index in sorted(range(len(marks)), key=lambda index: -crowded[index]):

        def cost(box: Box, mark: Box = marks[index]) -> tuple[float, float]:
            hidden = sum(map(box.overlap, placed.values())) + sum(map(box.overlap, marks))
            away = _away(box, mark)
            astray = away - min((_away(box, other) for other in marks if other is not mark), default=math.inf)
            crossed = sum(map(box.overlap, lines))
            return hidden, _FURTHER * away + _ASTRAY * max(astray, 0.0) + _OVER_LINE * crossed

        around = _around(marks[index], *sizes[index])
        placed[index] = min([box for box in around if box.inside(frame)] or around, key=cost)
    return [placed[index] for index in range(len(marks))]


def _around(mark: Box, width: float, height: float) -> list[Box]:
    """Boxes of that size beside a mark, in many directions, nearer ones first."""
    x, y = _middle(mark)
    found = []
    for gap in _GAPS:
        for step in range(_DIRECTIONS):
            angle = 2 * math.pi * step / _DIRECTIONS
            reach = (mark.right - mark.left) / 2 + gap
            middle_x = x + math.cos(angle) * (reach + width / 2)
            middle_y = y + math.sin(angle) * (reach + height / 2)
            found.append(Box(middle_x - width / 2, middle_y - height / 2, middle_x + width / 2, middle_y + height / 2))
    return found


def _middle(box: Box) -> tuple[float, float]:
    return (box.left + box.right) / 2, (box.top + box.bottom) / 2


def _away(box: Box, mark: Box) -> float:
    return math.dist(box.nearest(*_middle(mark)), _middle(mark))


def _distance(one: Box, other: Box) -> float:
    return math.dist(_middle(one), _middle(other))
