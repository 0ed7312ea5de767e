"""Colours that people with any colour vision can tell apart, the same in pages and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from harness.metrics.formatting import CELLS, MORE, OWN, of_schedules

if TYPE_CHECKING:
    from harness.comparison.runs import Cell

BLUE, GREEN, ORANGE = CELLS[0], CELLS[2], CELLS[4]  # colours of series that are no cells
OF_TIME = {
    "own": ("own work", BLUE),
    "others": ("other roles on the same devices", "#8CC5E8"),
    "idle": ("idle", "#E9EDF1"),
}
"""Names and colours of what the time of devices went to."""

DASHES = ("", "7 3", "2 3", "10 3 2 3")  # dashes of lines of cells, in their order: they can be told apart in grey, too
VERSIONS = ("#46237A", "#3B528B", "#23808D", "#27AD81", "#84D44B", "#F6E620")
"""Colours of policy versions 0, 1, ...: six steps of viridis, over and over; bars carry the number."""

ON_DARK_VERSIONS = ("#A184D6", "#6A8BD0", "#2FA0B0", "#27B884", "#84D44B", "#F6E620")
"""The same on a dark page, where the first three would vanish."""

KINDS = {
    "generate": "#0072B2",
    "load_weights": "#D55E00",
    "reward": "#F0E442",
    "filter": "#949494",
    "reference": "#CC79A7",
    "old_log_prob": "#56B4E9",
    "advantages": "#CA9161",
    "update_actor": "#009E73",
    "values": "#4D4D4D",
    "update_critic": "#7FB800",
    "publish_weights": "#E69F00",
    "stage_weights": "#FBAFE4",
    "wait_for_samples": "#EDEDED",
}
"""Colours of kinds of work, Okabe and Ito's and what their palette has too few of."""

INK, MUTED, EDGE, GRID, OTHER = "#1b2430", "#5b6675", "#b8c2cc", "#e8ecf0", "#7c8793"
"""Colours of text, of text that matters less, of axes, of grids, and of a line that others are held against."""
ON_PAGE = {
    **{INK: "var(--ink)", MUTED: "var(--muted)", EDGE: "var(--edge)", GRID: "var(--grid)", OTHER: "var(--other)"},
    "#ffffff": "var(--ground)",
}
"""Names of these colours in page.css."""

DARK = "#12181F"
"""The ground of a dark page."""
_CONTRAST = 4.5
_WAITS_ON_DARK = "#29333D"
_STEPS = 50  # from a colour to white


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, 1 to 21, as the Web Content Accessibility Guidelines define it."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = (part / 255 for part in _parts(colour))
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def on_dark(colour: str) -> str:
    """The colour as much nearer to white as it takes to be seen on a dark page."""
    for step in range(_STEPS):
        lighter = "#" + "".join(f"{round(part + (255 - part) * step / _STEPS):02X}" for part in _parts(colour))
        if contrast(lighter, DARK) >= _CONTRAST:
            return lighter
    return "#FFFFFF"


ON_DARK_KINDS = {
    kind: _WAITS_ON_DARK if kind == "wait_for_samples" else on_dark(colour) for kind, colour in KINDS.items()
}
"""Colours of kinds of work, on a dark page."""


def of_cells(labels: Iterable[str]) -> dict[str, str]:
    """Colours of cells by their labels: those of their schedules, where these name each another; else by number."""
    named = {label: label.split()[0] for label in labels}
    if len({*named.values()}) == len(named) and not OWN.keys().isdisjoint(named.values()):
        colours = of_schedules([*named.values()])
        return {label: colours[schedule] for label, schedule in named.items()}
    return dict(zip(named, cycle((*CELLS, *MORE)), strict=False))


def names_of(cells: Sequence[Cell]) -> list[str]:
    """Colours of cells for markup: `var(--cell-0)`, ..."""
    return [f"var(--cell-{number})" for number in range(len(cells))]


def style_of(cells: Sequence[Cell]) -> str:
    """Style sheet that defines these names, as page.css has the other colours."""
    colours = of_cells(cell.label for cell in cells).values()
    dark = _declared(map(on_dark, colours))
    return (
        f":root {{ {_declared(colours)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root:not(.paper) {{ {dark} }} }}\n"
    )


def _declared(colours: Iterable[str]) -> str:
    return " ".join(f"--cell-{number}: {colour};" for number, colour in enumerate(colours))
