"""Charts that need no script, as markup: dots with intervals, histograms, performance profiles, shares of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from matplotlib.axes import Axes

from harness.comparison.comparison import Comparison
from harness.comparison.curves import RoleTime, role_times
from harness.comparison.measures import CellMeasure
from harness.comparison.runs import Cell
from harness.metrics.formatting import percent
from harness.report.page.pictures import draw_lags, draw_profile
from harness.report.page.text import histogram_text, lag_text, profile_text
from harness.report.palette import names_of, of_cells
from harness.report.plots import inline_svg

_STRIP, _STRIP_HEIGHT, _EDGE = 220, 26, 8
_PANEL = (260, 164)


def staleness_cards(comparison: Comparison) -> str:
    """All on one scale, so that they can be compared."""
    return _drawn_cards(
        comparison,
        lambda panel, index, colour: draw_lags(panel, comparison.staleness[index], colour),
        list(map(histogram_text, comparison.staleness)),
        list(map(lag_text, comparison.cells)),
    )


def profile_cards(comparison: Comparison) -> str:
    """Likewise: one axis of scores for all."""
    cells = zip(comparison.cells, comparison.profiles, strict=True)
    return _drawn_cards(
        comparison,
        lambda panel, index, colour: draw_profile(panel, comparison.profiles[index], comparison, colour),
        [f"{cell.label}: {profile_text(profile)}" for cell, profile in cells],
        [""] * len(comparison.cells),
    )


def _drawn_cards(
    comparison: Comparison, draw: Callable[[Axes, int, str], None], labels: Sequence[str], feet: Sequence[str]
) -> str:
    """A card per cell with what `draw` draws into a panel. labels: the same in words; feet: what stands below."""
    colours, names = of_cells(comparison.cells), names_of(comparison.cells)
    cards = []
    for index, (cell, colour, name) in enumerate(zip(comparison.cells, colours, names, strict=True)):
        drawn = inline_svg(
            lambda figure, index=index, colour=colour: draw(figure.subplots(), index, colour),  # type: ignore[misc]
            _PANEL,
            "histogram",
            labels[index],
            {colour: name},
        )
        cards.append(_card(name, cell.label, drawn, feet[index]))
    return "".join(cards)


def device_cards(comparison: Comparison) -> str:
    """A card for each cell: how idle its devices were."""
    colours = names_of(comparison.cells)
    return "".join(
        _card(colour, cell.label, _idle(cell)) for cell, colour in zip(comparison.cells, colours, strict=True)
    )


def _card(colour: str, label: str, body: str, foot: str = "") -> str:
    text = f"<p>{escape(foot)}</p>" if foot else ""
    name = f'<i class="dot" style="background:{colour}"></i>{escape(label)}'
    return f'<div class="card"><h3>{name}</h3>{body}{text}</div>'


def _idle(cell: Cell) -> str:
    rows = "".join(_idle_row(time) for time in role_times(cell))
    return f'<table class="idle-table"><tbody>{rows}</tbody></table>'


def _idle_row(time: RoleTime) -> str:
    bar = shares_bar({"own": time.own, "others": time.others, "idle": time.idle})
    by_seed = ", ".join(percent(idle, 1) for idle in time.idle_by_seed)
    name = time.role.replace("_", " ")
    title = f"own work {percent(time.own, 1)}, other roles {percent(time.others, 1)}; idle by seed: {by_seed}"
    return (
        f'<tr title="{escape(title)}"><th scope="row">{escape(name)}</th><td>{bar}</td>'
        f"<td>{percent(time.idle, 1 if 0.995 <= time.idle < 0.9995 else 0)} idle</td></tr>"
    )


def span_of(cells: Sequence[CellMeasure]) -> tuple[float, float]:
    """The range that an axis must cover to show every seed and every bounded interval of one measure."""
    shown = [value for cell in cells for value in cell.per_seed.values() if math.isfinite(value)]
    for cell in cells:
        if cell.interval is not None and cell.interval.bounded:
            shown += [cell.interval.low, cell.interval.high]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    spare = 0.5 * abs(low) or 0.5
    return (low, high) if high > low else (low - spare, high + spare)


def strip(cell: CellMeasure, axis: tuple[float, float], colour: str) -> str:
    """One cell's seeds as dots, its mean as a line with its interval, on an axis that all cells of a measure share."""
    low, high = axis

    def x(value: float) -> float:
        return _EDGE + (value - low) / (high - low) * (_STRIP - 2 * _EDGE)

    middle = _STRIP_HEIGHT / 2
    marks = [f'<line x1="{_EDGE}" x2="{_STRIP - _EDGE}" y1="{middle}" y2="{middle}" class="rail"/>']
    if cell.interval is not None and cell.interval.bounded:
        left, right = x(cell.interval.low), x(cell.interval.high)
        marks.append(
            f'<rect x="{left:.1f}" y="{middle - 5}" width="{max(right - left, 1):.1f}" height="10" rx="2" '
            f'fill="{colour}" opacity="0.28"/>'
        )
    for value in cell.per_seed.values():
        if math.isfinite(value):
            marks.append(f'<circle cx="{x(value):.1f}" cy="{middle}" r="3.2" fill="{colour}" class="seed"/>')
    if math.isfinite(cell.value):
        at = x(cell.value)
        marks.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{middle - 9}" y2="{middle + 9}" class="mean"/>')
    return (
        f'<svg class="strip" viewBox="0 0 {_STRIP} {_STRIP_HEIGHT}" width="{_STRIP}" height="{_STRIP_HEIGHT}" '
        f'aria-hidden="true">{"".join(marks)}</svg>'
    )


def shares_bar(parts: Mapping[str, float]) -> str:
    """One bar of shares that make one whole, by the class that colours each."""
    pieces = "".join(f'<i class="{name}" style="width:{100 * share:.2f}%"></i>' for name, share in parts.items())
    return f'<span class="shares" aria-hidden="true">{pieces}</span>'
