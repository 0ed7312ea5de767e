"""Charts that need no script, as markup: dots with intervals, histograms, performance profiles, shares of time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from harness.comparison.comparison import Comparison
from harness.comparison.curves import PerformanceProfile, RoleTime, StalenessHistogram, role_times
from harness.comparison.measures import CellMeasure
from harness.comparison.runs import Cell
from harness.metrics.formatting import percent
from harness.report.page.text import histogram_text, lag_text, profile_text, share_label
from harness.report.palette import names_of

_STRIP, _STRIP_HEIGHT, _EDGE = 220, 26, 8
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _HEAD, _FOOT = 260, 164, 42, 16, 8, 36
_GRAIN = 0.05  # of the axis of scores


def staleness_cards(comparison: Comparison) -> str:
    """All on one scale, so that they can be compared."""
    highest = max(float(np.max(lags.shares)) for lags in comparison.staleness)
    return "".join(
        _card(colour, cell.label, histogram(lags, highest, colour, histogram_text(lags)), lag_text(cell))
        for cell, lags, colour in zip(comparison.cells, comparison.staleness, names_of(comparison.cells), strict=True)
    )


def profile_cards(comparison: Comparison) -> str:
    """Likewise: one axis of scores for all."""
    scores, base = score_range(comparison.profiles), comparison.profiles[comparison.baseline]
    cards = []
    for cell, profile, colour in zip(comparison.cells, comparison.profiles, names_of(comparison.cells), strict=True):
        label = f"{cell.label}: {profile_text(profile)}"
        cards.append(_card(colour, cell.label, profile_chart(profile, base, scores, colour, label)))
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


def histogram(staleness: StalenessHistogram, highest: float, colour: str, name: str) -> str:
    """Bars of the share of trained samples by worst lag; `highest` is the largest share of any cell. What lags by more
    than nine iterations shares the last bar."""
    shares, lags = staleness.grouped()
    width, height, foot, head = 260, 164, 36, 16
    step = width / len(shares)
    scale = (height - foot - head) / highest
    marks = []
    for number, (share, lag) in enumerate(zip(shares, lags, strict=True)):
        left, tall = number * step, share * scale
        marks.append(
            f'<rect x="{left + 0.1 * step:.1f}" y="{height - foot - tall:.1f}" width="{0.8 * step:.1f}" '
            f'height="{tall:.1f}" fill="{colour}"/>'
        )
        middle = left + step / 2
        if share > 0:
            label = share_label(share)
            marks.append(f'<text x="{middle:.1f}" y="{height - foot - tall - 4:.1f}" class="bar-label">{label}</text>')
        marks.append(f'<text x="{middle:.1f}" y="{height - foot + 14}" class="tick">{lag}</text>')
    marks.append(f'<line x1="0" x2="{width}" y1="{height - foot}" y2="{height - foot}" class="axis"/>')
    marks.append(f'<text x="{width / 2}" y="{height - 5}" class="tick">worst lag (iterations)</text>')
    return (
        f'<svg class="histogram" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">'
        f"{''.join(marks)}</svg>"
    )


def shares_bar(parts: Mapping[str, float]) -> str:
    """One bar of shares that make one whole, by the class that colours each."""
    pieces = "".join(f'<i class="{name}" style="width:{100 * share:.2f}%"></i>' for name, share in parts.items())
    return f'<span class="shares" aria-hidden="true">{pieces}</span>'


def profile_chart(
    profile: PerformanceProfile, baseline: PerformanceProfile, scores: tuple[float, float], colour: str, label: str
) -> str:
    """The cell's steps in its colour with their band, and the baseline's thin and grey behind; `scores` is the part of
    the axis that is shown."""
    shown = (profile.taus >= scores[0] - 1e-9) & (profile.taus <= scores[1] + 1e-9)

    def points(profile: PerformanceProfile, values: np.ndarray) -> list[str]:
        return [f"{_x(tau, scores):.1f},{_y(value):.1f}" for tau, value in _corners(profile.taus[shown], values[shown])]

    band = [*points(profile, profile.low), *reversed(points(profile, profile.high))]
    return (
        f'<svg class="histogram" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{_frame(scores)}"
        f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.13"/>'
        f'<polyline points="{" ".join(points(baseline, baseline.shares))}" class="other-line"/>'
        f'<polyline points="{" ".join(points(profile, profile.shares))}" class="mean-line" stroke="{colour}"/></svg>'
    )


def score_range(profiles: Sequence[PerformanceProfile]) -> tuple[float, float]:
    """The part of the scores in which the seeds of any cell end, with some room."""
    low = min(float(profile.taus[np.argmax(profile.shares < 1.0)]) for profile in profiles)
    high = max(float(profile.taus[np.argmax(profile.shares <= 0.0)]) for profile in profiles)
    grains = np.floor(low / _GRAIN - 0.2), np.ceil(high / _GRAIN + 0.2)
    least, most = (float(np.clip(grain * _GRAIN, 0.0, 1.0)) for grain in grains)
    return least, most


def _corners(taus: np.ndarray, values: np.ndarray) -> list[tuple[float, float]]:
    """Points where a line of steps turns, and its ends."""
    turns = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
    ends = [*turns[1:], len(taus) - 1]
    return [(float(taus[at]), float(values[turn])) for turn, end in zip(turns, ends, strict=True) for at in (turn, end)]


def _frame(scores: tuple[float, float]) -> str:
    bottom = _HEIGHT - _FOOT
    marks = []
    for share, name in ((0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")):
        kind = "axis" if share == 0 else "grid"
        y = f"{_y(share):.1f}"
        marks.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="{kind}"/>')
        marks.append(f'<text x="{_LEFT - 4}" y="{_y(share) + 3:.1f}" class="tick end">{name}</text>')
    for score in np.linspace(*scores, 3):
        marks.append(f'<text x="{_x(float(score), scores):.1f}" y="{bottom + 14}" class="tick">{score:.3g}</text>')
    marks.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 5}" class="tick">exact match at the end</text>'
    )
    return "".join(marks)


def _x(score: float, scores: tuple[float, float]) -> float:
    low, high = scores
    return _LEFT + (score - low) / (high - low) * (_WIDTH - _RIGHT - _LEFT)


def _y(share: float) -> float:
    return _HEIGHT - _FOOT - share * (_HEIGHT - _FOOT - _HEAD)
