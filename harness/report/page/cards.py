"""A card per cell: histogram of staleness, performance profile, and idle time of its devices."""

from __future__ import annotations

from html import escape

import numpy as np

from harness.comparison.parts import Cell
from harness.comparison.result import Comparison
from harness.report.page.devices import RoleTime, role_times
from harness.report.page.numbers import percent
from harness.report.page.palette import of_cell
from harness.report.page.profile import profile_chart, profile_scores, profile_told
from harness.report.page.svg import histogram, shares_bar
from harness.report.page.words import histogram_told, lag_told


def staleness_cards(comparison: Comparison) -> str:
    """All on one scale, so that they can be compared."""
    highest = max(float(np.max(its.shares)) for its in comparison.staleness)
    return "".join(
        _card(number, cell.label, histogram(its, highest, of_cell(number), histogram_told(its)), lag_told(cell))
        for number, (cell, its) in enumerate(zip(comparison.cells, comparison.staleness, strict=True))
    )


def profile_cards(comparison: Comparison) -> str:
    """Likewise: one axis of scores for all."""
    scores, base = profile_scores(comparison.profiles), comparison.profiles[comparison.baseline]
    cards = []
    for number, (cell, its) in enumerate(zip(comparison.cells, comparison.profiles, strict=True)):
        told = f"{cell.label}: {profile_told(its)}"
        cards.append(_card(number, cell.label, profile_chart(its, base, scores, of_cell(number), told)))
    return "".join(cards)


def device_cards(comparison: Comparison) -> str:
    return "".join(_card(number, cell.label, _idle(cell)) for number, cell in enumerate(comparison.cells))


def _card(number: int, label: str, body: str, foot: str = "") -> str:
    told = f"<p>{escape(foot)}</p>" if foot else ""
    name = f'<i class="dot" style="background:{of_cell(number)}"></i>{escape(label)}'
    return f'<div class="card"><h3>{name}</h3>{body}{told}</div>'


def _idle(cell: Cell) -> str:
    rows = "".join(_row(time) for time in role_times(cell))
    return f'<table class="idle-table"><tbody>{rows}</tbody></table>'


def _row(time: RoleTime) -> str:
    bar = shares_bar({"own": time.own, "others": time.others, "idle": time.idle})
    by_seed = ", ".join(percent(idle, 1) for idle in time.idle_by_seed)
    name = time.role.replace("_", " ")
    told = f"own work {percent(time.own, 1)}, other roles {percent(time.others, 1)}; idle by seed: {by_seed}"
    return (
        f'<tr title="{escape(told)}"><th scope="row">{escape(name)}</th><td>{bar}</td>'
        f"<td>{percent(time.idle, 1 if 0.995 <= time.idle < 0.9995 else 0)} idle</td></tr>"
    )
