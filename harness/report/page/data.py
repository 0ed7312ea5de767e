"""The page's data as plain JSON values: curves of every cell, and the timeline of each cell's first run."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from harness.comparison.comparison import Comparison
from harness.comparison.measures import HELD_OUT
from harness.metrics.definitions import definition
from harness.metrics.manifest import run_title
from harness.metrics.timeline import TRAINING_ROLE, Interval, Timeline, lanes
from harness.protocols import Span
from harness.report.gantt import DataVersion, data_versions
from harness.report.palette import DASHES, KINDS, ON_DARK_KINDS, ON_DARK_VERSIONS, VERSIONS, names_of

AXES = {"seconds": "time (s)", "samples": "samples trained", "tokens": "tokens trained (prompt and response)"}
TITLES = {
    key: f"{definition(key).title} ({definition(key).unit})"
    if definition(key).unit not in ("", "1/s")
    else definition(key).title
    for key in (
        *HELD_OUT,
        "reward/exact_match",
        "reward/mean",
        "response_length/mean",
        "throughput/samples_per_s",
        "staleness/mean",
        "policy/kl_behaviour",
        "policy/effective_samples",
        "policy/left_out",
    )
}
"""Titles of curves, in the order in which they are offered."""
_SIGNIFICANT = 5  # digits, more than any screen shows
MOST_SPANS = 60_000  # spans in one page at most, over all its runs: some two megabytes
MOST_ENGINES = 16  # engines of one role at most; more lanes than that cannot be read
_FIRST_ITERATIONS = 6
_UNKNOWN = -1  # version
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}

Owner = tuple[str, str]


def curves_data(comparison: Comparison) -> dict[str, Any]:
    """Every curve; what is not finite is null. `keys` and `axes` are those that occur, the most wanted first."""
    axes = dict(AXES)
    if comparison.simulated:
        axes["seconds"] = "simulated time (s)"
    present = {curve.key for curve in comparison.curves}
    keys = [key for key in TITLES if key in present] + sorted(present - TITLES.keys())
    return {
        "simulated": comparison.simulated,
        "axes": [[axis, title] for axis, title in axes.items() if any(c.axis == axis for c in comparison.curves)],
        "keys": [[key, TITLES.get(key, key)] for key in keys],
        "cells": [
            {"label": cell.label, "colour": colour, "dash": DASHES[number % len(DASHES)]}
            for number, (cell, colour) in enumerate(zip(comparison.cells, names_of(comparison.cells), strict=True))
        ],
        "curves": [
            {
                "cell": curve.cell,
                "key": curve.key,
                "axis": curve.axis,
                "window": curve.window,
                "grid": _rounded(curve.grid),
                "mean": _rounded(curve.mean),
                "low": _rounded(curve.low),
                "high": _rounded(curve.high),
                "seeds": [[seed, _rounded(values)] for seed, values in curve.per_seed.items()],
            }
            for curve in comparison.curves
        ],
    }


def _rounded(values: np.ndarray) -> list[float | None]:
    """Values to some digits; null for what is not finite."""
    return [float(f"{value:.{_SIGNIFICANT}g}") if np.isfinite(value) else None for value in values.tolist()]


def timelines_data(comparison: Comparison) -> dict[str, Any]:
    """The first run of each cell, with the colours of all."""
    most = MOST_SPANS // len(comparison.cells)
    return {
        "kinds": list(KINDS),
        "colours": {
            "light": {"kinds": list(KINDS.values()), "versions": list(VERSIONS)},
            "dark": {"kinds": list(ON_DARK_KINDS.values()), "versions": list(ON_DARK_VERSIONS)},
        },
        "runs": [
            timeline_data(run.timeline, run_title(run.identity), data_versions(run.timeline, run.samples), most)
            | {"label": f"{cell.label}, seed {run.identity.seed}"}
            for cell in comparison.cells
            for run in cell.runs[:1]
        ],
    }


def timeline_data(timeline: Timeline, title: str, version: DataVersion, most: int = MOST_SPANS) -> dict[str, Any]:
    """One run's timeline, times in microseconds on the run's clock.

    rows: an engine each, with one list of numbers per lane: start, duration, kind, version of the data (-1 where that
    is not known), iteration, and again.
    arrows: row of the trainer, row of the engine, when the trainer began to publish, when the engine had loaded, the
    version. ends: iteration and end. window: what to show at first. left_out: sentences on what is not here.
    most: spans at most; what comes after them is left out, by whole iterations."""
    owners, left_out = _shown_owners(timeline)
    spans = [span for span in timeline.spans if (span.role, span.engine) in owners]
    until = _until(timeline, spans, most)
    kept = [span for span in spans if span.start < until]
    by_owner: dict[Owner, list[Span]] = defaultdict(list)
    for span in kept:
        by_owner[span.role, span.engine].append(span)
    first, last = first_window(timeline)
    return {
        "title": title,
        "warmup": timeline.warmup,
        "start": _microseconds(timeline.started_at),
        "end": _microseconds(min(until, timeline.elapsed_window()[1])),
        "window": [_microseconds(first), _microseconds(min(last, until))],
        "ends": [[i, _microseconds(at)] for i, at in sorted(timeline.iteration_ends.items()) if at <= until],
        "rows": [
            {
                "role": role,
                "engine": engine,
                "pool": timeline.placement[role, engine].pool,
                "lanes": [_numbers(lane, version) for lane in lanes(by_owner[role, engine])],
            }
            for role, engine in owners
        ],
        "arrows": _arrows(kept, owners),
        "left_out": [*left_out, *_left_out_time(timeline, len(spans) - len(kept), until)],
    }


def first_window(timeline: Timeline, iterations: int = _FIRST_ITERATIONS) -> Interval:
    """Some iterations to begin with: those after the warm-up, as far as there are so many, else from the first on."""
    order = sorted(timeline.iteration_ends)
    if not order:
        return timeline.elapsed_window()
    start = timeline.warmup if len(order) >= timeline.warmup + iterations else 0
    shown = order[start : start + iterations]
    return timeline.window(shown[0])[0], timeline.window(shown[-1])[1]


def _shown_owners(timeline: Timeline) -> tuple[dict[Owner, int], list[str]]:
    """Engines that have a row, and its number; and a sentence for each role of which not all have one."""
    seen, shown = Counter[str](), dict[Owner, int]()
    for role, engine in timeline.placement:
        seen[role] += 1
        if seen[role] <= MOST_ENGINES:
            shown[role, engine] = len(shown)
    more = {role: count for role, count in seen.items() if count > MOST_ENGINES}
    return shown, [f"{role}: {MOST_ENGINES} of {count:,} engines have a row." for role, count in more.items()]


def _until(timeline: Timeline, spans: list[Span], most: int) -> float:
    """The end of the last iteration up to which there are no more than `most` spans; of the first if it has more."""
    if len(spans) <= most:
        return float("inf")
    ends = sorted(timeline.iteration_ends.values())
    whole = [end for end in ends if end <= spans[most].start]
    return whole[-1] if whole else ends[0]


def _arrows(spans: Iterable[Span], owners: dict[Owner, int]) -> list[list[int]]:
    """Arrows to each engine that loads a version, from the trainer's first engine as it last published it."""
    published: dict[int, Span] = {}
    arrows = []
    for span in sorted(spans, key=lambda span: span.start if span.kind == "publish_weights" else span.end):
        row = owners[span.role, span.engine]
        if span.kind == "publish_weights" and span.role == TRAINING_ROLE:
            kept = published.get(span.version)
            if kept is None or row <= owners[kept.role, kept.engine]:
                published[span.version] = span
        elif span.kind == "load_weights" and span.version in published:
            source = published[span.version]
            ends = (_microseconds(source.start), _microseconds(span.end))
            arrows.append([owners[source.role, source.engine], row, *ends, span.version])
    return arrows


def _numbers(lane: Iterable[Span], version: DataVersion) -> list[int]:
    numbers = []
    for span in lane:
        found = version(span)
        times = (_microseconds(span.start), _microseconds(span.end - span.start))
        numbers += [*times, _KIND_NUMBERS[span.kind], _UNKNOWN if found is None else found, span.iteration]
    return numbers


def _left_out_time(timeline: Timeline, spans: int, until: float) -> list[str]:
    if not spans:
        return []
    shown = sum(end <= until for end in timeline.iteration_ends.values())
    return [
        f"Only the first {shown:,} of {len(timeline.iteration_ends):,} iterations are here; {spans:,} later spans "
        "stand in the run's trace.json."
    ]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
