"""Sets of time as sorted, disjoint intervals. Pure functions; seconds."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as sorted, disjoint intervals; empty ones vanish and touching ones merge."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What of the intervals lies inside the window."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if end > low and start < high]


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered, overlaps counted once."""
    return sum((end - start for start, end in union(intervals)), 0.0)


def subtract(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """The time in `intervals` and in none of the `holes`."""
    left: list[Interval] = []
    cuts = union(holes)
    for start, end in union(intervals):
        for low, high in clip(cuts, (start, end)):
            if low > start:
                left.append((start, low))
            start = high
        if end > start:
            left.append((start, end))
    return left
