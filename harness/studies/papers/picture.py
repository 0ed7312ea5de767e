"""A paper experiment's figures as bars: published, simulated, measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.report.plots import BLUE, GRAY, GREEN
from harness.studies.papers.result import Line, Published
from harness.studies.papers.tables import ROLES, error, text

_SERIES = {"published": GRAY, "simulated": BLUE, "measured": GREEN}
_HEIGHT = 0.8  # of all bars of a line


def draw_bars(figure: Figure, lines: Sequence[Line]) -> None:
    """A panel for each quantity, a bar for each figure; a published band is a bar from end to end."""
    quantities = list(dict.fromkeys(line.quantity for line in lines))
    panels_of = [[line for line in lines if line.quantity == quantity] for quantity in quantities]
    figure.set_size_inches(10, 1.4 + sum(0.5 + 0.55 * len(here) for here in panels_of))
    panels = figure.subplots(len(quantities), 1, squeeze=False, height_ratios=[len(here) for here in panels_of])[:, 0]
    for axes, quantity, here in zip(panels, quantities, panels_of, strict=True):
        _panel(axes, quantity, here)
    told = _drawn(lines)
    handles = [Patch(facecolor=_SERIES[name], label=name) for name in told]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(told)))


def _panel(axes: Axes, quantity: str, lines: Sequence[Line]) -> None:
    shown = _drawn(lines)
    height = _HEIGHT / max(1, len(shown))
    for place, line in enumerate(lines):
        for number, name in enumerate(shown):
            value = _of(line, name)
            if isinstance(value, str | None):
                continue
            left, width = (value[0], value[1] - value[0]) if isinstance(value, tuple) else (0.0, value)
            at = place - _HEIGHT / 2 + height * (number + 0.5)
            axes.barh(at, width, height * 0.92, left=left, color=_SERIES[name])
            told = text(value) + (f" ({error(line)})" if name == "simulated" and error(line) else "")
            axes.annotate(told, (left + width, at), (4, 0), textcoords="offset points", va="center", fontsize="small")
    axes.set_yticks(np.arange(len(lines)), [f"{line.label}\n{ROLES[line.role]}".strip() for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel(quantity)
    axes.margins(x=0.15)
    axes.grid(axis="y", visible=False)


def _drawn(lines: Sequence[Line]) -> list[str]:
    """The series that have a figure to draw."""
    return [name for name in _SERIES if any(not isinstance(_of(line, name), str | None) for line in lines)]


def _of(line: Line, name: str) -> Published:
    values: dict[str, Published] = {
        "published": line.published,
        "simulated": line.simulated,
        "measured": line.measured,
    }
    return values[name]
