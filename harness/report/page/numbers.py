"""How figures are written for people: as many digits as mean something, the same ones for a value and its interval."""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.comparison.statistics.estimates import Interval

_SIGNIFICANT = 3


def decimals(values: Iterable[float]) -> int:
    """Digits behind the point that give the largest of the values three digits in all; none if it has more before."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest == 0.0:
        return 0
    return min(4, max(0, _SIGNIFICANT - 1 - math.floor(math.log10(largest))))


def figure(value: float, digits: int) -> str:
    """1,234 or 0.123. What was never reached is infinite, what there is not is NaN."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    told = f"{value:,.{digits}f}"
    return f"−{told[1:]}" if told.startswith("-") else told


def bounds(interval: Interval | None, digits: int) -> str:
    """[low, high], or why there are none."""
    if interval is None:
        return "no interval"
    if not interval.bounded:
        return "one seed"
    return f"[{figure(interval.low, digits)}, {figure(interval.high, digits)}]"


def signed(value: float, digits: int) -> str:
    """A difference, with its sign unless it is nothing."""
    told = figure(value, digits)
    return f"+{told}" if value > 0 and told.strip("0.,") else told


def percent(share: float, digits: int = 0) -> str:
    return f"{figure(100 * share, digits)} %"


def plural(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
