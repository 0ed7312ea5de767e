"""Colours of cells on the page: names in the markup, and the style that says what they are on light and on dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.comparison.runs import Cell
from harness.report.palette import of_cells, on_dark


def names_of(cells: Sequence[Cell]) -> list[str]:
    """For markup: `var(--cell-0)`, ..."""
    return [f"var(--cell-{number})" for number in range(len(cells))]


def style_of(cells: Sequence[Cell]) -> str:
    """What these names are, as page.css has the other colours."""
    colours = of_cells(cells)
    dark = _declared(map(on_dark, colours))
    return (
        f":root {{ {_declared(colours)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root:not(.paper) {{ {dark} }} }}\n"
    )


def _declared(colours: Iterable[str]) -> str:
    return " ".join(f"--cell-{number}: {colour};" for number, colour in enumerate(colours))
