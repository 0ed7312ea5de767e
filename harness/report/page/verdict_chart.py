"""The chart of the verdict: how fast each cell trains against what it learns, with both intervals, and how stale its
samples are; laid out once, and painted into the page and into pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import fill
from typing import Literal

from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from harness.comparison.comparison import Comparison
from harness.comparison.measure_text import against, scale_of, titled
from harness.comparison.measures import EXACT_MATCH, LAG, SPEED, Measure
from harness.comparison.statistics.estimates import Interval
from harness.report.page.labels import Box, places
from harness.report.palette import names_of, of_cells

WIDE, NARROW = (900.0, 340.0), (362.0, 400.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 14.0, 12.0, 44.0
_SPARE = 0.09  # of an axis, at both ends
_LEAST_SHARE = 0.1  # of exact matches: noise fills no chart
_NAME, _NOTE, _LINE = 7.3, 6.0, 14.0  # a letter's width, and a line's height
_FAR = 12.0  # from a mark, from where on a line leads to its label
_CAPTION = 150  # letters in a line of a picture
_INK, _MUTED, _GRID = "#1b2430", "#5b6675", "#e8ecf0"

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Line:
    """kind: grid, guide (through the baseline), bar (an interval) or leader (to a label)."""

    kind: str
    ends: tuple[float, float, float, float]  # x, y, x, y
    cell: int | None = None


@dataclass(frozen=True)
class Mark:
    """filled: of a cell that the verdict is for; square: the baseline."""

    x: float
    y: float
    radius: float
    cell: int
    filled: bool
    square: bool


@dataclass(frozen=True)
class Words:
    """kind: tick, title, name or note."""

    kind: str
    x: float
    y: float
    text: str
    anchor: Anchor
    upright: bool = False


@dataclass(frozen=True)
class Layout:
    """Things to paint, first to last; from the upper left corner."""

    size: tuple[float, float]
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...]
    words: tuple[Words, ...]


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
        bounded = all(interval.bounded for both in self._values for interval in both)
        means = "Means with their 95 % intervals" if bounded else "One seed has no interval"
        text = f"{means}. The square, and the dashed lines through it, are {base}. "
        if self.up.key == EXACT_MATCH:
            text += "The larger a mark, the staler its samples (mean lag in iterations). "
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

    def layout(self, size: tuple[float, float]) -> Layout:
        """Place everything on a picture of this size."""
        width, height = size
        frame = Box(_LEFT, _TOP, width - _RIGHT, height - _BOTTOM)
        x = _Axis(self.across, frame.left, frame.right)
        y = _Axis(self.up, frame.bottom, frame.top)
        lines, words = [], []
        for value, at in x.ticks(max(3, int(width / 130))):
            lines.append(Line("grid", (at, frame.top, at, frame.bottom)))
            words.append(Words("tick", at, frame.bottom + 17, value, "middle"))
        for value, at in y.ticks(5):
            lines.append(Line("grid", (frame.left, at, frame.right, at)))
            words.append(Words("tick", frame.left - 7, at + 4, value, "end"))
        simulated = ", simulated" if self.comparison.simulated else ""
        better = "higher is better" if self.up.better else "how stale samples are"
        words.append(Words("title", frame.right, height - 6, f"samples per second{simulated}: faster →", "end"))
        words.append(Words("title", 13, (frame.top + frame.bottom) / 2, f"{titled(self.up)}: {better}", "middle", True))
        middles = [(x.at(a.value), y.at(b.value)) for a, b in self._values]
        base = middles[self.comparison.baseline]
        lines.append(Line("guide", (base[0], frame.top, base[0], frame.bottom)))
        lines.append(Line("guide", (frame.left, base[1], frame.right, base[1])))
        bars = [bar for index in range(len(middles)) for bar in self._bars(index, x, y, middles[index])]
        marks = [self._mark(index, *middle) for index, middle in enumerate(middles)]
        return self._labelled(frame, size, [*lines, *bars], marks, words)

    def _labelled(
        self, frame: Box, size: tuple[float, float], lines: list[Line], marks: list[Mark], words: list[Words]
    ) -> Layout:
        names = [cell.label for cell in self.comparison.cells]
        notes = [self._note(index) for index in range(len(marks))]
        sizes = [
            (max(_NAME * len(name), _NOTE * len(note)), 2 * _LINE) for name, note in zip(names, notes, strict=True)
        ]
        covered = [Box.around(mark.x, mark.y, mark.radius + 2) for mark in marks]
        crossed = [Box.of_line(*line.ends) for line in lines if line.kind in ("bar", "guide")]
        for mark, box, name, note in zip(marks, places(covered, sizes, frame, crossed), names, notes, strict=True):
            near = box.nearest(mark.x, mark.y)
            if math.dist(near, (mark.x, mark.y)) > mark.radius + _FAR:
                lines.append(Line("leader", (mark.x, mark.y, *near), mark.cell))
            anchor: Anchor = "end" if box.right < mark.x else "start"
            at = box.right if anchor == "end" else box.left
            words.append(Words("name", at, box.top + 11, name, anchor))
            words.append(Words("note", at, box.top + 24, note, anchor))
        smaller_last = sorted(marks, key=lambda mark: mark.radius, reverse=True)  # over what they would lie under
        return Layout(size, tuple(lines), tuple(smaller_last), tuple(words))

    @property
    def _values(self) -> list[tuple[Interval, Interval]]:
        """Intervals across and up; one without bounds where there are none."""
        return [(_interval(self.across, index), _interval(self.up, index)) for index in range(len(self.across.cells))]

    def _bars(self, index: int, x: _Axis, y: _Axis, middle: tuple[float, float]) -> list[Line]:
        across, up = self._values[index]
        bars = []
        if across.bounded:
            bars.append(Line("bar", (x.at(across.low), middle[1], x.at(across.high), middle[1]), index))
        if up.bounded:
            bars.append(Line("bar", (middle[0], y.at(up.low), middle[0], y.at(up.high)), index))
        return bars

    def _mark(self, index: int, x: float, y: float) -> Mark:
        radius = 5.0 + 2.2 * math.sqrt(self._lag(index))
        comparison = self.comparison
        return Mark(x, y, radius, index, index in comparison.best, index == comparison.baseline)

    def _lag(self, index: int) -> float:
        measure = self.comparison.measure(LAG)
        return measure.cells[index].value if measure is not None else 0.0

    def _note(self, index: int) -> str:
        """A line on the cell, in the words of the tables; and its lag."""
        parts = ["baseline"] if index == self.comparison.baseline else []
        question = self.comparison.measure(self.comparison.question)
        found = against(question, index) if question is not None else None
        if found is not None:
            parts.append(found.value if found.verdict != "same" else "no significant difference")
        learnt = against(self.up, index)
        if self.comparison.question == SPEED and learnt is not None and learnt.verdict in ("better", "worse"):
            parts.append(learnt.value)
        measure = self.comparison.measure(LAG)
        if measure is not None:
            parts.append(f"lag {scale_of(measure).value(self._lag(index))}")
        return " · ".join(parts)


def chart_of(comparison: Comparison) -> VerdictChart | None:
    """None where there is no verdict to show: something forbids it, or a cell is alone."""
    across, up = comparison.measure(SPEED), comparison.measure(EXACT_MATCH) or comparison.measure(LAG)
    if comparison.faults or len(comparison.cells) == 1 or across is None or up is None:
        return None
    return VerdictChart(comparison, across, up)


def _interval(measure: Measure, index: int) -> Interval:
    cell = measure.cells[index]
    return cell.interval or Interval(cell.value, -math.inf, math.inf)


class _Axis:
    """Values of a measure along a line from `begin` to `end`; a share's never narrower than some points."""

    def __init__(self, measure: Measure, begin: float, end: float) -> None:
        self.begin, self.end, self.factor = begin, end, scale_of(measure).factor
        intervals = [_interval(measure, index) for index in range(len(measure.cells))]
        values = [i.value for i in intervals] + [b for i in intervals if i.bounded for b in (i.low, i.high)]
        low, high = min(values), max(values)
        least = _LEAST_SHARE if measure.key == EXACT_MATCH else 0.2 * abs(high) or 1.0
        lacking = max(0.0, least - (high - low)) / 2
        spare = _SPARE * max(high - low, least)
        self.low, self.high = low - lacking - spare, high + lacking + spare

    def at(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self, most: int) -> list[tuple[str, float]]:
        """Ticks as written, and where; none below zero."""
        values = MaxNLocator(most).tick_values(self.low * self.factor, self.high * self.factor)
        inside = [value for value in values if max(self.low, 0) <= value / self.factor <= self.high]
        return [(f"{value:,.12g}", self.at(value / self.factor)) for value in inside]


def chart_html(chart: VerdictChart) -> str:
    """Twice, for wide windows and for narrow ones, of which one is shown."""
    svgs = "".join(
        _svg(chart.layout(size), name, names_of(chart.comparison.cells), chart.words)
        for name, size in (("wide-one", WIDE), ("narrow-one", NARROW))
    )
    return (
        f'<figure class="verdict-chart">{svgs}<figcaption class="caption">{escape(chart.caption)}</figcaption></figure>'
    )


def _svg(layout: Layout, name: str, colours: Sequence[str], words: str) -> str:
    width, height = layout.size
    parts: list[str] = []
    for line in layout.lines:
        x1, y1, x2, y2 = line.ends
        stroke = "" if line.cell is None else f' stroke="{colours[line.cell]}"'
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{line.kind}-line"{stroke}/>'
        )
    for mark in layout.marks:
        fill = colours[mark.cell] if mark.filled else "var(--ground)"
        r = mark.radius
        place = (
            f'rect x="{mark.x - r:.1f}" y="{mark.y - r:.1f}" width="{2 * r:.1f}" height="{2 * r:.1f}"'
            if mark.square
            else f'circle cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="{r:.1f}"'
        )
        parts.append(f'<{place} class="mark" fill="{fill}" stroke="{colours[mark.cell]}"/>')
    for text in layout.words:
        turn = f' transform="rotate(-90 {text.x:.1f} {text.y:.1f})"' if text.upright else ""
        parts.append(
            f'<text x="{text.x:.1f}" y="{text.y:.1f}" class="{text.kind}" text-anchor="{text.anchor}"{turn}>'
            f"{escape(text.text)}</text>"
        )
    return (
        f'<svg class="{name}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(words)}">'
        f"{''.join(parts)}</svg>"
    )


def draw_chart(chart: VerdictChart, figure: Figure) -> None:
    """The same as a picture, a point of print for a unit."""
    width, height = WIDE
    head, foot = 30.0, 36.0  # for the title, and for the caption
    whole = head + height + foot
    figure.set_layout_engine("none")  # the layout is given
    figure.set_size_inches(width / 72, whole / 72)
    axes = figure.add_axes((0, foot / whole, 1, height / whole))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    layout, colours = chart.layout(WIDE), of_cells(chart.comparison.cells)
    styles = {
        "grid": {"color": _GRID, "linewidth": 1.0, "zorder": 1},
        "guide": {"color": _MUTED, "linewidth": 1.0, "linestyle": (0, (4, 4)), "zorder": 1},
        "bar": {"linewidth": 1.8, "alpha": 0.75, "zorder": 2},
        "leader": {"linewidth": 0.8, "alpha": 0.7, "zorder": 2},
    }
    for line in layout.lines:
        x1, y1, x2, y2 = line.ends
        painted = {} if line.cell is None else {"color": colours[line.cell]}
        axes.plot((x1, x2), (y1, y2), **styles[line.kind], **painted)  # type: ignore[arg-type]
    for mark in layout.marks:
        axes.plot(
            mark.x,
            mark.y,
            "s" if mark.square else "o",
            markersize=2 * mark.radius,
            markeredgewidth=2.2,
            color=colours[mark.cell],
            markerfacecolor=colours[mark.cell] if mark.filled else "white",
            zorder=3,
        )
    sides = {"start": "left", "middle": "center", "end": "right"}
    fonts = {
        "tick": {"fontsize": 10, "color": _MUTED},
        "title": {"fontsize": 10.5, "color": _INK},
        "name": {"fontsize": 10.5, "color": _INK, "fontweight": "bold"},
        "note": {"fontsize": 9.5, "color": _MUTED},
    }
    for text in layout.words:
        turn = {"rotation": 90, "va": "center"} if text.upright else {"va": "baseline"}
        halo = [withStroke(linewidth=3, foreground="white")]
        axes.text(text.x, text.y, text.text, ha=sides[text.anchor], path_effects=halo, **turn, **fonts[text.kind])  # type: ignore[arg-type]
    caption = fill(chart.caption, _CAPTION)
    figure.text(_LEFT / width, foot / whole, caption, va="top", fontsize=9, color=_MUTED)
