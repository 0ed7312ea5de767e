"""Gantt charts, a lane per engine: of one run its first iterations, of two runs the same seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import fill

import pandas as pd
import pyarrow as pa
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from harness.metrics.timeline import BACKGROUND_SYNC_KINDS, SYNC_KINDS, Interval, Timeline, lanes
from harness.protocols import Span
from harness.report.drawing import legend_below, letters_across, lines_high
from harness.report.palette import KINDS, VERSIONS, contrast

_ITERATIONS = 6
_TRANSFERS = SYNC_KINDS | BACKGROUND_SYNC_KINDS
_WAIT = "wait_for_samples"
_UNTRAINED = _TRANSFERS | {_WAIT}
"""Kinds of spans that are of no data."""
_NOT_TRAINED = "#B8C2CC"
_SMALLEST_GAP = 0.003  # of the width
_LOWEST_LABEL = 0.1  # of a lane of an engine: text in a lower bar would not be readable
MOST_BARS = 4_000
"""Bars in one panel, at most; what a picture lasts grows with them, and others may have written a trace."""
_SEEN = 0.0003  # of the width: a bar that is shorter cannot be seen

Owner = tuple[str, str]
Paint = Callable[[Span], tuple[str, str]]
"""The colour of a bar, and what is written in it."""


@dataclass(frozen=True)
class NamedTimeline:
    """One run beside others. version: of the data of its spans."""

    name: str
    timeline: Timeline
    version: DataVersion


def draw_gantt(figure: Figure, timeline: Timeline, version: DataVersion, iterations: int = _ITERATIONS) -> pd.DataFrame:
    """Draw the first iterations of `timeline`, coloured by the version that sampled the data."""
    shown, window = first_window(timeline, iterations)
    figure.set_size_inches(13, 1.9 + 0.5 * len(timeline.placement))
    axes = figure.subplots()
    bars = draw_lanes(axes, timeline, list(timeline.placement), shown, window, by_data(version))
    legend_of_data(figure, drawn := _as_table(bars, version))
    return drawn


def draw_same_seconds(figure: Figure, runs: Sequence[NamedTimeline], iterations: int = _ITERATIONS) -> pd.DataFrame:
    """A panel each, after warm-up and on one scale of time, as long as the slowest takes for so many iterations; with
    how many each ends in that time, and without roles of the host."""
    starts = [run.timeline.steady_window()[0] for run in runs]
    ends = [
        sorted(end for end in run.timeline.iteration_ends.values() if end > start + 1e-9)
        for run, start in zip(runs, starts, strict=True)
    ]
    length = max(own[min(iterations, len(own)) - 1] - start for own, start in zip(ends, starts, strict=True))
    owners = [[o for o, place in run.timeline.placement.items() if not place.pool.startswith("host ")] for run in runs]
    figure.set_figheight(lines_high(4 + sum(5 + 2.4 * len(own) for own in owners)))
    panels = figure.subplots(len(runs), 1, squeeze=False, height_ratios=[len(own) for own in owners])[:, 0]
    tables = []
    for axes, run, start, own in zip(panels, runs, starts, owners, strict=True):
        window = (start, start + length)
        within = [i for i, end in run.timeline.iteration_ends.items() if start < end - 1e-9 and end <= window[1] + 1e-9]
        bars = draw_lanes(axes, run.timeline, own, within, window, by_data(run.version))
        title = fill(f"{run.name}: {len(within)} iterations in {length:.2g} s", letters_across(figure, 0.8))
        axes.set_title(title, loc="left", fontweight="bold", pad=lines_high(1.7) * 72)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _, start=start: f"{value - start:.12g}"))
        axes.set_xticks([start + tick for tick in _ticks(length)])
        axes.set_xlabel("")
        tables.append(_as_table(bars, run.version).assign(label=run.name))
    panels[-1].set_xlabel("seconds, from the end of warm-up")
    legend_of_data(figure, drawn := pd.concat(tables, ignore_index=True))
    return drawn


def _as_table(bars: Sequence[Span], version: DataVersion) -> pd.DataFrame:
    """A row for each bar. data: the version of its data, missing where it has none."""
    fields = ("role", "engine", "kind", "start", "end", "version", "iteration")
    rows = [{name: getattr(span, name) for name in fields} for span in bars]
    data = [version(span) if span.kind not in _UNTRAINED else None for span in bars]
    return pd.DataFrame(rows, columns=fields).assign(data=pd.array(data, "Int64"))


def _ticks(length: float) -> list[float]:
    step = next(
        step
        for step in (0.001 * factor * 10**power for power in range(9) for factor in (1, 2, 5))
        if length / step <= 12
    )
    return [round(step * number, 6) for number in range(int(length / step) + 1)]


def draw_lanes(
    axes: Axes, timeline: Timeline, engines: Sequence[Owner], shown: Sequence[int], window: Interval, paint: Paint
) -> list[Span]:
    """A lane for each of these engines, over this window; the iterations `shown` are marked above. Returns what has a
    bar."""
    within = (span for span in timeline.spans if span.end > window[0] and span.start < window[1])
    spans = [span for span in within if (span.role, span.engine) in set(engines)]
    if len(spans) > MOST_BARS:
        told = f"the first {MOST_BARS:,} of {len(spans):,} bars"
        axes.annotate(told, (1, 0), (-4, 4), "axes fraction", "offset points", ha="right", va="bottom")
        spans = spans[:MOST_BARS]
    for row, owner in enumerate(engines):
        stacked = lanes(s for s in spans if (s.role, s.engine) == owner)
        height = 0.8 / max(1, len(stacked))
        for lane, lane_spans in enumerate(stacked):
            for span in lane_spans:
                _bar(axes, span, window, row - 0.4 + lane * height, height, paint)
    _mark_iterations(axes, timeline, shown, window)
    alone = {role for role, _ in engines if sum(owner == role for owner, _ in engines) == 1}
    axes.set_yticks(range(len(engines)), [role if role in alone else f"{role} {engine}" for role, engine in engines])
    axes.set(xlim=window, ylim=(len(engines) - 0.4, -0.6), xlabel="time since the run began (s)")
    axes.grid(visible=False)
    return spans


def by_kind(span: Span) -> tuple[str, str]:
    """A colour for each kind of work; in bars the iteration, or the version that samples or moves."""
    text = f"v{span.version}" if span.kind in OWN_KINDS else str(span.iteration)
    return KINDS[span.kind], "" if span.kind == _WAIT else text


def by_data(version: DataVersion) -> Paint:
    """A colour for each version of the data, which is written in the bar; weights on their way have another."""

    def paint(span: Span) -> tuple[str, str]:
        if span.kind == _WAIT:
            return KINDS[_WAIT], ""
        if span.kind in _TRANSFERS:
            return KINDS["load_weights"], f"v{span.version}"
        found = version(span)
        return (_NOT_TRAINED, "") if found is None else (VERSIONS[found % len(VERSIONS)], f"v{found}")

    return paint


def legend(figure: Figure, bars: Sequence[Span], length: float) -> None:
    """Add a legend below everything: a colour for each kind of work of which a bar can be seen in so many seconds."""
    present = {span.kind for span in bars if span.end - span.start > _SEEN * length}
    handles = [_patch(color, kind.replace("_", " ")) for kind, color in KINDS.items() if kind in present]
    told = Patch(fill=False, edgecolor="none", label="in bars: iteration, or v = weight version")
    legend_below(figure, [*handles, told])


def legend_of_data(figure: Figure, drawn: pd.DataFrame) -> None:
    """Add a legend below everything: the colours of versions, and of what else is drawn."""
    kinds, data = set(drawn["kind"]), drawn[~drawn["kind"].isin(_UNTRAINED)]["data"]
    versions, steps = sorted(data.dropna().unique()), len(VERSIONS)
    handles: list[Artist] = [Patch(fill=False, edgecolor="none", label="sampled by version")] if versions else []
    if len(versions) <= steps:
        handles += [_patch(VERSIONS[version % steps], str(version)) for version in versions]
    else:
        handles += [_patch(color, f"{number}, {number + steps}, …") for number, color in enumerate(VERSIONS)]
    handles += [_patch(_NOT_TRAINED, "not trained")] if data.isna().any() else []
    handles += [_patch(KINDS["load_weights"], "weights on their way")] if kinds & _TRANSFERS else []
    handles += [_patch(KINDS[_WAIT], "waits for samples")] if _WAIT in kinds else []
    legend_below(figure, handles)


def _patch(color: str, label: str) -> Patch:
    return Patch(facecolor=color, edgecolor="0.6" if color == KINDS[_WAIT] else color, label=label)


def first_window(timeline: Timeline, iterations: int) -> tuple[list[int], Interval]:
    """The iterations to show and their window. A first iteration that takes more than half of it, because everything
    starts in it, is left out, so that the rest can be seen."""
    order = sorted(timeline.iteration_ends)
    shown = order[:iterations]
    first, last = timeline.window(shown[0]), timeline.window(shown[-1])
    if len(order) > 1 and first[1] - first[0] > 0.5 * (last[1] - first[0]):
        shown = order[1 : iterations + 1]
    return shown, (timeline.window(shown[0])[0], timeline.window(shown[-1])[1])


def _bar(axes: Axes, span: Span, window: Interval, bottom: float, height: float, paint: Paint) -> None:
    start, end = max(span.start, window[0]), min(span.end, window[1])
    color, text = paint(span)
    share = (end - start) / (window[1] - window[0])
    gap = 0.4 if share > _SMALLEST_GAP else 0.0  # a gap keeps neighbours apart, but would swallow a thin bar
    axes.add_patch(Rectangle((start, bottom), end - start, height, facecolor=color, edgecolor="white", linewidth=gap))
    if not text or share * letters_across(axes.figure.figure) < len(text) or height < _LOWEST_LABEL:
        return
    ink = max("#FFFFFF", "#262626", key=lambda ink: contrast(ink, color))
    axes.text((start + end) / 2, bottom + height / 2, text, ha="center", va="center", color=ink, fontsize="small")


def _mark_iterations(axes: Axes, timeline: Timeline, shown: Sequence[int], window: Interval) -> None:
    windows = {iteration: timeline.window(iteration) for iteration in shown}
    narrowest = min((end - start for start, end in windows.values()), default=0.0) / (window[1] - window[0])
    roomy = narrowest * letters_across(axes.figure.figure) > len("iteration 12")
    for iteration, (start, end) in windows.items():
        if end < window[1]:
            axes.axvline(end, color="0.25", linewidth=0.8, linestyle=(0, (4, 3)), zorder=3)
        axes.annotate(
            f"iteration {iteration}" if roomy else f"{iteration}",
            ((start + end) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize="small",
            color="0.35",
        )


OWN_KINDS = SYNC_KINDS | BACKGROUND_SYNC_KINDS | {"generate"}
"""Kinds of work whose span has the version itself: of the weights that travel, or that sample."""
_ROUNDED_S = 1e-6  # what times in files may be off

DataVersion = Callable[[Span], int | None]


def data_versions(timeline: Timeline, samples: pa.Table) -> DataVersion:
    """The version that sampled the first token of most of the samples that a span is about, the older of two.

    Where the actor computes a micro-batch, those are its samples; of all other work on samples, those of the batch:
    their first version is known once they are trained. None where none of them was. samples: samples.parquet.
    """
    batches: dict[int, list[int]] = defaultdict(list)
    micro_batches: dict[tuple[int, float], list[int]] = defaultdict(list)
    columns = (samples[name].to_pylist() for name in ("trained_iteration", "trained_at", "version_first"))
    for iteration, at, first in zip(*columns, strict=True):
        if iteration is not None:
            batches[iteration].append(first)
            micro_batches[iteration, at].append(first)
    updates: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind == "update_actor":
            updates[span.iteration].append(span)
    of_batch = {iteration: _most_common(versions) for iteration, versions in batches.items()}
    of_update: dict[Span, int] = {}
    for (iteration, at), versions in micro_batches.items():
        before = [span for span in updates[iteration] if span.end <= at + _ROUNDED_S]
        if before:
            of_update[max(before, key=lambda span: span.end)] = _most_common(versions)

    def version(span: Span) -> int | None:
        if span.kind in OWN_KINDS:
            return span.version
        return of_update.get(span, of_batch.get(span.iteration))

    return version


def _most_common(versions: Sequence[int]) -> int:
    counts = Counter(versions)
    return min(counts, key=lambda version: (-counts[version], version))
