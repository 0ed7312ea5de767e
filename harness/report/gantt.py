"""Gantt charts, a lane per engine: of runs the same seconds after their warm-up, of one run its first iterations."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from harness.metrics.formatting import plural
from harness.metrics.timeline import BACKGROUND_SYNC_KINDS, SYNC_KINDS, Timeline, lanes
from harness.protocols import Span
from harness.report.drawing import legend_below, letters_across, lines_high
from harness.report.palette import KINDS, VERSIONS, contrast

_ITERATIONS = 6
_TRANSFERS = SYNC_KINDS | BACKGROUND_SYNC_KINDS
_WAIT = "wait_for_samples"
_ITERATION = "iteration"
_UNTRAINED = _TRANSFERS | {_WAIT, _ITERATION}  # kinds of spans that are of no data
_NOT_TRAINED = "#B8C2CC"
_IDLES = 0.05  # of the time: an engine of the host that does less has no lane
_SMALLEST_GAP = 0.003  # of the width
_LOWEST_LABEL = 0.1  # of a lane of an engine: text in a lower bar would not be readable
MOST_BARS = 4_000
"""Bars in one panel, at most; what a picture lasts grows with them, and others may have written a trace."""
_SEEN = 0.0003  # of the width: a bar that is shorter cannot be seen
Paint = Callable[[Any], tuple[str, str]]  # the colour of a bar, a row of the table, and what is written in it
DataVersion = Callable[[Span], int | None]


def same_seconds(
    runs: Mapping[str, tuple[Timeline, DataVersion | None]], iterations: int = _ITERATIONS
) -> pd.DataFrame:
    """Tabulate what devices did in the same seconds after warm-up, as many as the slowest of these runs takes for so
    many iterations: a row for each bar, and, of the kind `iteration`, for each iteration that ends in that time. label:
    of the run, with how many bars it has beyond the longest `MOST_BARS`; start, end: from the end of its warm-up on;
    data: as its `DataVersion` says, where it has one. Left out are engines on the host that do next to nothing."""
    starts = {label: timeline.steady_window()[0] for label, (timeline, _) in runs.items()}
    ends = {
        label: sorted(end for end in timeline.iteration_ends.values() if end > starts[label] + 1e-9)
        for label, (timeline, _) in runs.items()
    }
    length = max(own[min(iterations, len(own)) - 1] - starts[label] for label, own in ends.items())
    tables = []
    for label, (timeline, version) in runs.items():
        start = starts[label]
        spans = [s for s in timeline.spans if s.end > start and s.start < start + length]
        longest = sorted(spans, key=lambda span: span.start - span.end)[:MOST_BARS]
        of_engines = [
            [span for span in longest if (span.role, span.engine) == owner]
            for owner, place in timeline.placement.items()
            if not place.pool.startswith("host ")
            or timeline.busy_seconds(owner[0]) > _IDLES * timeline.elapsed_window()[1]
        ]
        bars = [span for of_engine in of_engines for span in of_engine]
        label += f" (the longest {MOST_BARS:,} of {len(spans):,} bars)" if len(spans) > MOST_BARS else ""
        within = [
            i for i, end in timeline.iteration_ends.items() if start < end - 1e-9 and end <= start + length + 1e-9
        ]
        marks = [Span(_ITERATION, "0", _ITERATION, *timeline.window(iteration), 0, iteration) for iteration in within]
        table = _as_table([*bars, *marks], version).assign(label=label)
        tables.append(
            table.assign(start=(table["start"] - start).clip(0), end=(table["end"] - start).clip(upper=length))
        )
    return pd.concat(tables, ignore_index=True)


def draw_same_seconds(figure: Figure, data: pd.DataFrame) -> None:
    """A panel for each run, on one scale of time, with how many iterations each ends in it; coloured by the version of
    the data where that is known, else by kind of work."""
    data = data.astype({"role": str, "engine": str})
    length, paint = float(data["end"].max()), _by_data if data["data"].notna().any() else _by_kind
    bars = data[data["kind"] != _ITERATION]
    lanes_of = [len(of[["role", "engine"]].drop_duplicates()) for _, of in bars.groupby("label", sort=False)]
    figure.set_figheight(lines_high(4 + sum(5 + 2.4 * count for count in lanes_of)))
    panels = figure.subplots(len(lanes_of), 1, squeeze=False, height_ratios=lanes_of)[:, 0]
    for axes, (label, rows) in zip(panels, data.groupby("label", sort=False), strict=True):
        marks = [*rows[rows["kind"] == _ITERATION].itertuples()]
        _draw_lanes(axes, bars[bars["label"] == label], length, paint)
        _mark_iterations(axes, marks, length)
        title = f"{label} · {plural(len(marks), 'iteration')} in {length:.3g} s".removeprefix(" · ")
        title = fill(title, letters_across(figure, 0.8))
        axes.set_title(title, loc="left", fontweight="bold", pad=lines_high(1.7) * 72)
    panels[-1].set_xlabel("seconds, from the end of warm-up")
    (_legend_of_kinds if paint is _by_kind else _legend_of_data)(figure, bars)


def _as_table(bars: Sequence[Span], version: DataVersion | None) -> pd.DataFrame:
    """A row for each bar. data: the version of its data, missing where it has none."""
    fields = ("role", "engine", "kind", "start", "end", "version", "iteration")
    rows = [{name: getattr(span, name) for name in fields} for span in bars]
    data = [version(span) if version and span.kind not in _UNTRAINED else None for span in bars]
    return pd.DataFrame(rows, columns=fields).assign(data=pd.array(data, "Int64"))


def _draw_lanes(axes: Axes, bars: pd.DataFrame, length: float, paint: Paint) -> None:
    """A lane for each engine."""
    engines = list(dict.fromkeys(zip(bars["role"], bars["engine"], strict=True)))
    for row, (_, of) in enumerate(bars.groupby(["role", "engine"], sort=False)):
        bars_of: Any = of.itertuples()
        stacked = lanes(bars_of)
        height = 0.8 / len(stacked)
        for lane, spans in enumerate(stacked):
            for span in spans:
                _bar(axes, span, length, row - 0.4 + lane * height, height, paint)
    roles = [role for role, _ in engines]
    names = [role if roles.count(role) == 1 else f"{role} {engine}" for role, engine in engines]
    axes.set_yticks(range(len(engines)), names)
    axes.set(xlim=(0.0, length), ylim=(len(engines) - 0.4, -0.6))
    axes.grid(visible=False)


def _by_kind(bar: Any) -> tuple[str, str]:
    """A colour for each kind of work; in bars the iteration, or the version that samples or moves."""
    text = f"v{bar.version}" if bar.kind in OWN_KINDS else str(bar.iteration)
    return KINDS[bar.kind], "" if bar.kind == _WAIT else text


def _by_data(bar: Any) -> tuple[str, str]:
    """A colour for each version of the data, which is written in the bar; weights on their way have another."""
    if bar.kind == _WAIT:
        return KINDS[_WAIT], ""
    if bar.kind in _TRANSFERS:
        return KINDS["load_weights"], f"v{bar.version}"
    return (_NOT_TRAINED, "") if pd.isna(bar.data) else (VERSIONS[int(bar.data) % len(VERSIONS)], f"v{int(bar.data)}")


def _legend_of_kinds(figure: Figure, drawn: pd.DataFrame) -> None:
    """Add a legend below everything: a colour for each kind of work of which a bar can be seen."""
    present = {*drawn["kind"][drawn["end"] - drawn["start"] > _SEEN * drawn["end"].max()]}
    handles = [_patch(color, kind.replace("_", " ")) for kind, color in KINDS.items() if kind in present]
    told = Patch(fill=False, edgecolor="none", label="in bars: iteration, or v = weight version")
    legend_below(figure, [*handles, told])


def _legend_of_data(figure: Figure, drawn: pd.DataFrame) -> None:
    """Add a legend below everything: the colours of versions, and of what else is drawn."""
    kinds, data = set(drawn["kind"]), drawn[~drawn["kind"].isin(_UNTRAINED)]["data"]
    versions, steps = sorted({*map(int, data.dropna())}), len(VERSIONS)
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


def _bar(axes: Axes, bar: Any, length: float, bottom: float, height: float, paint: Paint) -> None:
    color, text = paint(bar)
    share = (bar.end - bar.start) / length
    gap = 0.4 if share > _SMALLEST_GAP else 0.0  # a gap keeps neighbours apart, but would swallow a thin bar
    place: Any = ((bar.start, bottom), bar.end - bar.start, height)
    axes.add_patch(Rectangle(*place, facecolor=color, edgecolor="white", linewidth=gap))
    if not text or share * letters_across(axes.figure.figure) < len(text) or height < _LOWEST_LABEL:
        return
    ink, middle = max("#FFFFFF", "#262626", key=lambda ink: contrast(ink, color)), (bar.start + bar.end) / 2
    axes.text(middle, bottom + height / 2, text, ha="center", va="center", color=ink, fontsize="small")


def _mark_iterations(axes: Axes, marks: Sequence[Any], length: float) -> None:
    """Mark above where iterations are, and their ends."""
    narrowest = min((mark.end - mark.start for mark in marks), default=0.0) / length
    roomy = narrowest * letters_across(axes.figure.figure) > len("iteration 12")
    for mark in marks:
        if mark.end < length:
            axes.axvline(mark.end, color="0.25", linewidth=0.8, linestyle=(0, (4, 3)), zorder=3)
        axes.annotate(
            f"iteration {mark.iteration}" if roomy else f"{mark.iteration}",
            ((mark.start + mark.end) / 2, 1.0),
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


def data_versions(timeline: Timeline, samples: pa.Table) -> DataVersion:
    """The version that sampled the first token of most of the samples that a span is about, the older of two. Where the
    actor computes a micro-batch, those are its samples; of all other work on samples, those of the batch: their first
    version is known once they are trained. None where none of them was. samples: samples.parquet."""
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
