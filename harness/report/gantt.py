"""The Gantt chart of a run's first iterations: one lane per engine, one colour per kind of work."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from harness.metrics.timeline import BACKGROUND_SYNC_KINDS, SYNC_KINDS, Interval, Timeline, lanes
from harness.protocols import Span
from harness.report.palette import KINDS

_ITERATIONS = 6
_SHOW_VERSION = SYNC_KINDS | BACKGROUND_SYNC_KINDS | {"generate"}
_SMALLEST_GAP = 0.003  # of the width
_SMALLEST_LABEL = 0.006  # of the width, per character: text in a narrower bar would not be readable


def draw_gantt(figure: Figure, timeline: Timeline, iterations: int = _ITERATIONS) -> None:
    """Draw the first iterations of `timeline`; numbers are iterations, `v` the weight version that samples or moves."""
    shown, window = first_window(timeline, iterations)
    figure.set_size_inches(13, 1.9 + 0.5 * len(timeline.placement))
    draw_lanes(figure.subplots(), timeline, shown, window)
    legend(figure, [timeline], window)


def draw_lanes(axes: Axes, timeline: Timeline, shown: list[int], window: Interval) -> None:
    """A lane for every engine, over this window; the iterations `shown` are marked above."""
    spans = _within(timeline, window)
    engines = list(timeline.placement)
    for row, owner in enumerate(engines):
        stacked = lanes(s for s in spans if (s.role, s.engine) == owner)
        height = 0.8 / max(1, len(stacked))
        for lane, lane_spans in enumerate(stacked):
            for span in lane_spans:
                _bar(axes, span, window, row - 0.4 + lane * height, height)
    _mark_iterations(axes, timeline, shown)
    alone = {role for role in timeline.roles if sum(owner == role for owner, _ in engines) == 1}
    axes.set_yticks(range(len(engines)), [role if role in alone else f"{role} {engine}" for role, engine in engines])
    axes.set(xlim=window, ylim=(len(engines) - 0.4, -0.6), xlabel="time since the run began (s)")
    axes.grid(visible=False)


def legend(figure: Figure, timelines: Sequence[Timeline], window: Interval = (0.0, float("inf"))) -> None:
    """Below everything: a colour for each kind of work that is in the window of one of these."""
    present = {span.kind for timeline in timelines for span in _within(timeline, window)}
    handles = [
        Patch(facecolor=color, edgecolor="0.6" if kind == "wait_for_samples" else color, label=kind.replace("_", " "))
        for kind, color in KINDS.items()
        if kind in present
    ]
    handles.append(Patch(fill=False, edgecolor="none", label="in bars: iteration, or v = weight version"))
    figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // 2))


def _within(timeline: Timeline, window: Interval) -> list[Span]:
    return [span for span in timeline.spans if span.end > window[0] and span.start < window[1]]


def first_window(timeline: Timeline, iterations: int) -> tuple[list[int], Interval]:
    """The iterations to show and their window. A first iteration that takes more than half of it, because everything
    starts in it, is left out, so that the rest can be seen."""
    order = sorted(timeline.iteration_ends)
    shown = order[:iterations]
    first, last = timeline.window(shown[0]), timeline.window(shown[-1])
    if len(order) > 1 and first[1] - first[0] > 0.5 * (last[1] - first[0]):
        shown = order[1 : iterations + 1]
    return shown, (timeline.window(shown[0])[0], timeline.window(shown[-1])[1])


def _bar(axes: Axes, span: Span, window: Interval, bottom: float, height: float) -> None:
    start, end = max(span.start, window[0]), min(span.end, window[1])
    color = to_rgb(KINDS[span.kind])
    share = (end - start) / (window[1] - window[0])
    gap = 0.4 if share > _SMALLEST_GAP else 0.0  # a gap keeps neighbours apart, but would swallow a thin bar
    axes.add_patch(Rectangle((start, bottom), end - start, height, facecolor=color, edgecolor="white", linewidth=gap))
    text = f"v{span.version}" if span.kind in _SHOW_VERSION else str(span.iteration)
    if span.kind == "wait_for_samples" or share < _SMALLEST_LABEL * len(text):
        return
    ink = "white" if sum(color) < 1.7 else "0.15"
    axes.text((start + end) / 2, bottom + height / 2, text, ha="center", va="center", color=ink, fontsize="small")


def _mark_iterations(axes: Axes, timeline: Timeline, shown: list[int]) -> None:
    for iteration in shown:
        start, end = timeline.window(iteration)
        if iteration != shown[-1]:
            axes.axvline(end, color="0.25", linewidth=0.8, linestyle=(0, (4, 3)), zorder=3)
        axes.annotate(
            f"iteration {iteration}",
            ((start + end) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize="small",
            color="0.35",
        )
