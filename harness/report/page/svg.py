"""Charts that need no script: dots with intervals, histograms, shares of time. Each returns markup as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from harness.comparison.parts import CellMeasure, StalenessHistogram

_STRIP, _STRIP_HEIGHT, _EDGE = 220, 26, 8
_MOST_LAGS = 10


def span_of(cells: Sequence[CellMeasure]) -> tuple[float, float]:
    """What an axis must cover to show every seed and every bounded interval of one measure."""
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


def histogram(staleness: StalenessHistogram, highest: float, colour: str, label: str) -> str:
    """Bars of the share of trained samples by worst lag; `highest` is the largest share of any cell. What lags by more
    than nine iterations shares the last bar."""
    shares, names = grouped(staleness)
    width, height, foot, head = 260, 164, 36, 16
    step = width / len(shares)
    scale = (height - foot - head) / highest
    marks = []
    for number, (share, name) in enumerate(zip(shares, names, strict=True)):
        left, tall = number * step, share * scale
        marks.append(
            f'<rect x="{left + 0.1 * step:.1f}" y="{height - foot - tall:.1f}" width="{0.8 * step:.1f}" '
            f'height="{tall:.1f}" fill="{colour}"/>'
        )
        middle = left + step / 2
        if share > 0:
            marks.append(
                f'<text x="{middle:.1f}" y="{height - foot - tall - 4:.1f}" class="bar-label">{short(share)}</text>'
            )
        marks.append(f'<text x="{middle:.1f}" y="{height - foot + 14}" class="tick">{name}</text>')
    marks.append(f'<line x1="0" x2="{width}" y1="{height - foot}" y2="{height - foot}" class="axis"/>')
    marks.append(f'<text x="{width / 2}" y="{height - 5}" class="tick">worst lag (iterations)</text>')
    return (
        f'<svg class="histogram" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(marks)}</svg>"
    )


def grouped(staleness: StalenessHistogram) -> tuple[Sequence[float], Sequence[str]]:
    """Shares and the names of their lags, the largest lags together."""
    lags, shares = [str(lag) for lag in staleness.lags.tolist()], staleness.shares
    if len(lags) <= _MOST_LAGS:
        return shares.tolist(), lags
    kept = _MOST_LAGS - 1
    return [*shares[:kept].tolist(), float(np.sum(shares[kept:]))], [*lags[:kept], f"{kept}+"]


def short(share: float) -> str:
    """A share in few characters, for a bar of its own."""
    if share < 0.001:
        return "<0.1%"
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def shares_bar(parts: Mapping[str, float]) -> str:
    """One bar of shares that make one whole, by the class that colours each."""
    pieces = "".join(f'<i class="{name}" style="width:{100 * share:.2f}%"></i>' for name, share in parts.items())
    return f'<span class="shares" aria-hidden="true">{pieces}</span>'
