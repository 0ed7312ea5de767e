"""The timeline as Chrome trace JSON, which Perfetto and chrome://tracing open, and back.

One process per role, one thread per engine; version and iteration are arguments of each slice. What the viewer does not
need, but a reader of the run does (placement, iteration ends), stands in `otherData`, so the file holds the whole
Timeline. Format: "Trace Event Format" (complete events "X" and metadata events "M"), times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span

_SAME_INSTANT_S = 1e-9


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The JSON object of trace.json."""
    events: list[dict[str, Any]] = []
    processes = {role: number for number, role in enumerate(timeline.roles, start=1)}
    for role, process in processes.items():
        events.append(_metadata("process_name", process, 0, name=role))
        events.append(_metadata("process_sort_index", process, 0, sort_index=process))
    spans = timeline.spans
    thread = 0
    for role, engine in timeline.placement:
        of_engine = [s for s in spans if (s.role, s.engine) == (role, engine)]
        for lane, lane_spans in enumerate(lanes(of_engine) or [[]]):
            thread += 1
            name = engine if lane == 0 else f"{engine} (overlapping {lane})"
            events.append(_metadata("thread_name", processes[role], thread, name=name))
            events.append(_metadata("thread_sort_index", processes[role], thread, sort_index=thread))
            events.extend(_slice(span, processes[role], thread) for span in lane_spans)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "started_at": timeline.started_at,
            "warmup": timeline.warmup,
            "iteration_ends": {str(i): at for i, at in timeline.iteration_ends.items()},
            "placement": [
                {"role": role, "engine": engine, "pool": place.pool, "devices": list(place.devices)}
                for (role, engine), place in timeline.placement.items()
            ],
        },
    }


def timeline_of(trace: dict[str, Any]) -> Timeline:
    """The Timeline that `chrome_trace` was given, times rounded to nanoseconds."""
    other = trace["otherData"]
    placement = {(p["role"], p["engine"]): Place(p["pool"], tuple(p["devices"])) for p in other["placement"]}
    timeline = Timeline(placement, started_at=other["started_at"], warmup=other["warmup"])
    for iteration, at in other["iteration_ends"].items():
        timeline.end_iteration(int(iteration), at)
    timeline.add(_span(event) for event in trace["traceEvents"] if event["ph"] == "X")
    return timeline


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans of one engine laid out so that none overlap in a lane, each in the first lane that is free when it starts.

    An engine whose weights arrive while it generates has two; viewers draw overlapping slices of one thread wrongly.
    """
    laid: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        for lane in laid:
            if lane[-1].end <= span.start + _SAME_INSTANT_S:
                lane.append(span)
                break
        else:
            laid.append([span])
    return laid


def _slice(span: Span, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.kind,
        "cat": span.role,
        "pid": process,
        "tid": thread,
        "ts": round(span.start * 1e6, 3),
        "dur": round((span.end - span.start) * 1e6, 3),
        "args": {"engine": span.engine, "version": span.version, "iteration": span.iteration},
    }


def _span(event: dict[str, Any]) -> Span:
    start, args = event["ts"] / 1e6, event["args"]
    return Span(
        role=event["cat"],
        engine=args["engine"],
        kind=event["name"],
        start=start,
        end=start + event["dur"] / 1e6,
        version=args["version"],
        iteration=args["iteration"],
    )


def _metadata(kind: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
