"""Spans of work on devices, and the idle time, bound and phase times that follow from them.

All times are seconds on the run's clock. A span is work if its kind is in WORK_KINDS; waiting is not, and
neither is `stage_weights`: weights that travel from host to host while devices go on.

trace.json holds the whole Timeline in the "Trace Event Format" (complete events "X" and metadata events "M", times in
microseconds), which Perfetto and chrome://tracing open: one process per role, one thread per engine; version and
iteration are arguments of each slice. What no viewer needs (placement, iteration ends) stands in `otherData`."""

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from harness.metrics.schemas import Restart, TraceFile, TraceSpan
from harness.protocols import Span

SYNC_KINDS = frozenset({"load_weights", "publish_weights"})
CRITIC_KINDS = ("values", "update_critic")
_PHASES = ("generate", "reference", "old_log_prob", "advantages", "update_actor")
WORK_KINDS = SYNC_KINDS | {*_PHASES, "reward", "filter", *CRITIC_KINDS}
BACKGROUND_SYNC_KINDS = frozenset({"stage_weights"})
KINDS = WORK_KINDS | BACKGROUND_SYNC_KINDS | {"wait_for_samples"}
TRAINING_ROLE = "actor"
SYNC_ROLES = ("rollout", "actor", "actor_fwd")  # roles that weights travel between

# `reward` has no time of its own among the metrics; its spans count in idle/reward and in the trace.
_PHASE_METRICS = {kind: f"time/{kind}_s" for kind in _PHASES}
_CRITICS_METRICS = {kind: f"time/{kind}_s" for kind in CRITIC_KINDS}
_SAME_INSTANT_S = 1e-9
Interval = tuple[float, float]  # start and end, in seconds


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an engine: a pool (devices that a schedule splits work over) and its devices in that pool."""

    pool: str
    devices: tuple[str, ...]


class Timeline:
    """Collects spans and answers for any window of time. placement: (role, engine) -> Place, for every engine, also
    those that never do anything; its order is the order of the lanes in pictures. Several engines may share devices:
    then their work on a device is counted once. warmup: iterations left out of run-level figures."""

    def __init__(self, placement: Mapping[tuple[str, str], Place], *, started_at: float = 0.0, warmup: int = 2) -> None:
        self.placement = dict(placement)
        self.warmup = warmup
        self.started_at = started_at
        self.iteration_ends: dict[int, float] = {}
        self._by_iteration: dict[int, list[Span]] = defaultdict(list)
        self._by_device: dict[str, list[Span]] = defaultdict(list)  # work only; each sorted by end
        self._background_syncs: list[Span] = []  # sorted by end

    @property
    def spans(self) -> list[Span]:
        """Every span, by start."""
        return sorted((s for spans in self._by_iteration.values() for s in spans), key=lambda s: (s.start, s.end))

    @property
    def roles(self) -> list[str]:
        """Roles in the order of the placement."""
        return list(dict.fromkeys(role for role, _ in self.placement))

    def add(self, spans: Iterable[Span]) -> None:
        """Record spans, in any order. Raises ValueError for an engine without a place, an unknown kind, or a span that
        ends before it starts."""
        for span in spans:
            if (span.role, span.engine) not in self.placement:
                raise ValueError(f"span of {span.role}/{span.engine}, which has no place; placed are {self._names()}")
            if span.kind not in KINDS:
                raise ValueError(f"unknown kind of span {span.kind!r}; one of {', '.join(sorted(KINDS))}")
            if span.end < span.start:
                raise ValueError(f"span ends before it starts: {span}")
            self._by_iteration[span.iteration].append(span)
            if span.kind in WORK_KINDS:
                for device in self.placement[span.role, span.engine].devices:
                    insort(self._by_device[device], span, key=_end)
            elif span.kind in BACKGROUND_SYNC_KINDS:
                insort(self._background_syncs, span, key=_end)

    def end_iteration(self, iteration: int, at: float) -> None:
        """An iteration ended at `at`; the next one's window starts there. Raises ValueError if time goes back."""
        last = self.elapsed_window()[1]
        if at < last:
            raise ValueError(f"iteration {iteration} ends at {at} s, before the previous one ended at {last} s")
        self.iteration_ends[iteration] = at

    def forget(self, iteration: int) -> None:
        """Forget spans of iterations up to this one, which has ended, alone: no more can be asked of those."""
        end = self.iteration_ends[iteration]
        for past in [past for past in self._by_iteration if past <= iteration]:
            del self._by_iteration[past]
        for spans in (*self._by_device.values(), self._background_syncs):
            del spans[: bisect_right(spans, end, key=_end)]

    def window(self, iteration: int) -> Interval:
        """Seconds from the end of the iteration before (or the start of the run) to the end of this one."""
        end = self.iteration_ends[iteration]
        earlier = [at for i, at in self.iteration_ends.items() if i < iteration]
        return (max(earlier, default=self.started_at), end)

    def elapsed_window(self) -> Interval:
        """Seconds from the start of the run to the end of its last iteration."""
        return (self.started_at, max(self.iteration_ends.values(), default=self.started_at))

    def steady_window(self) -> Interval:
        """The run without its warm-up iterations; all of it if it has no more iterations than those."""
        ends = sorted(self.iteration_ends.values())
        start = ends[self.warmup - 1] if 0 < self.warmup < len(ends) else self.started_at
        return (start, self.elapsed_window()[1])

    def busy_seconds(self, role: str, window: Interval | None = None) -> float:
        """Seconds of this role's own work in the window (default: steady_window), a mean over the role's devices."""
        return self._busy(self._devices_of_role(role), window or self.steady_window(), {role})

    def idle(self, role: str, window: Interval | None = None) -> float:
        """Share of the window (default: steady_window) in which the role's devices did no work, of any role."""
        window = window or self.steady_window()
        return 1.0 - self._busy(self._devices_of_role(role), window) / _elapsed(window)

    def fraction_of_bound(self, window: Interval | None = None) -> float:
        """The work of the busiest pool (mean over its devices) over the window's length: 1 means that no schedule could
        have done the same work on these pools in less time."""
        window = window or self.steady_window()
        pools: dict[str, set[str]] = defaultdict(set)
        for place in self.placement.values():
            pools[place.pool].update(place.devices)
        return max(self._busy(devices, window) for devices in pools.values()) / _elapsed(window)

    def iteration_metrics(self, iteration: int) -> dict[str, float]:
        """The time/* metrics of an iteration that has ended, and idle and bound in its window.

        A phase's time is the sum of its spans that carry this iteration, over the number of engines that have one:
        seconds per engine. Waiting is the training role's. weight_sync: seconds of the iteration's window in which some
        weight transfer was going on, in the background or not; exposed: seconds in which a transfer kept a device busy
        that did nothing else, a mean over the devices of roles that take or give weights, so that engines which load in
        turn are not counted as if all had stopped. What travels in the background keeps none busy, and hides nothing.
        """
        spans, window = self._by_iteration[iteration], self.window(iteration)
        metrics = {"time/iteration_s": _elapsed(window)}
        critics = _CRITICS_METRICS if "critic" in self.roles else {}
        for kind, name in (_PHASE_METRICS | critics).items():
            metrics[name] = _seconds_per_engine(s for s in spans if s.kind == kind)
        metrics["time/wait_for_samples_s"] = _seconds_per_engine(
            s for s in spans if s.kind == "wait_for_samples" and s.role == TRAINING_ROLE
        )
        syncs: list[Interval] = clip(((s.start, s.end) for s in _overlapping(self._background_syncs, window)), window)
        exposed = 0.0
        for device in self._devices(self.placement.values()):
            work = list(self._on_device(device, window))
            sync = [(s.start, s.end) for s in work if s.kind in SYNC_KINDS]
            syncs += clip(sync, window)
            alone = subtract(sync, [(s.start, s.end) for s in work if s.kind not in SYNC_KINDS])
            exposed += length(clip(alone, window))
        metrics["time/weight_sync_s"] = length(syncs)
        holders = self._devices(place for (role, _), place in self.placement.items() if role in SYNC_ROLES)
        metrics["time/weight_sync_exposed_s"] = exposed / max(1, len(holders))
        metrics |= {f"idle/{role}": self.idle(role, window) for role in self.roles}
        metrics["throughput/fraction_of_bound"] = self.fraction_of_bound(window)
        return metrics

    def _on_device(self, device: str, window: Interval) -> Iterator[Span]:
        """Work on a device that overlaps the window."""
        return _overlapping(self._by_device.get(device, []), window)

    def _busy(self, devices: Collection[str], window: Interval, roles: Collection[str] | None = None) -> float:
        """Seconds of work in the window, a mean over devices; of these roles only, or of all."""
        return sum(
            length(
                clip(
                    ((s.start, s.end) for s in self._on_device(device, window) if roles is None or s.role in roles),
                    window,
                )
            )
            for device in devices
        ) / len(devices)

    def _devices(self, places: Iterable[Place]) -> list[str]:
        return list(dict.fromkeys(device for place in places for device in place.devices))

    def _devices_of_role(self, role: str) -> list[str]:
        devices = self._devices(place for (owner, _), place in self.placement.items() if owner == role)
        if not devices:
            raise ValueError(f"no device is placed for role {role!r}; placed are {self._names()}")
        return devices

    def _names(self) -> str:
        return ", ".join(f"{role}/{engine}" for role, engine in self.placement)


def _end(span: Span) -> float:
    return span.end


def _overlapping(spans: Sequence[Span], window: Interval) -> Iterator[Span]:
    """Spans, of those sorted by end, that overlap the window."""
    for span in spans[bisect_right(spans, window[0], key=_end) :]:
        if span.start < window[1]:
            yield span


def _elapsed(window: Interval) -> float:
    if window[1] <= window[0]:
        raise ValueError(f"the window {window} has no length: no share of it can be taken")
    return window[1] - window[0]


def _seconds_per_engine(spans: Iterable[Span]) -> float:
    total, engines = 0.0, set()
    for span in spans:
        total += span.end - span.start
        engines.add((span.role, span.engine))
    return total / len(engines) if engines else 0.0


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
    """Parts of the intervals inside of the window."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if end > low and start < high]


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered, overlaps counted once."""
    return sum((end - start for start, end in union(intervals)), 0.0)


def subtract(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """The time in `intervals` and in none of the `holes`."""
    left: list[Interval] = []
    cuts, first = union(holes), 0
    for start, end in union(intervals):
        while first < len(cuts) and cuts[first][1] <= start:
            first += 1
        at = first
        while at < len(cuts) and cuts[at][0] < end:
            if cuts[at][0] > start:
                left.append((start, cuts[at][0]))
            start, at = cuts[at][1], at + 1
        if end > start:
            left.append((start, end))
    return left


def chrome_trace(timeline: Timeline, restarts: Iterable[Restart] = ()) -> dict[str, Any]:
    """The JSON object of trace.json: spans, and marks where roles were started again."""
    events: list[dict[str, Any]] = [_mark(restart) for restart in restarts]
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


def timeline_of(trace: TraceFile) -> Timeline:
    """The Timeline that `chrome_trace` was given, times rounded to nanoseconds."""
    told = trace.other_data
    placement = {(one.role, one.engine): Place(one.pool, one.devices) for one in told.placement}
    timeline = Timeline(placement, started_at=told.started_at, warmup=told.warmup)
    for iteration, at in told.iteration_ends.items():
        timeline.end_iteration(int(iteration), at)
    timeline.add(_span(event) for event in trace.trace_events if isinstance(event, TraceSpan))
    return timeline


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans of one engine laid out so that none overlap in a lane, each in the first lane that is free when it starts.
    An engine whose weights arrive while it generates has two; viewers draw overlapping slices of one thread wrongly."""
    laid: list[list[Span]] = []
    taken: list[tuple[float, int]] = []  # until when, and which lane; a heap, so that no span looks at every lane
    free: list[int] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        while taken and taken[0][0] <= span.start + _SAME_INSTANT_S:
            heappush(free, heappop(taken)[1])
        lane = heappop(free) if free else len(laid)
        if lane == len(laid):
            laid.append([])
        laid[lane].append(span)
        heappush(taken, (span.end, lane))
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


def _mark(restart: Restart) -> dict[str, Any]:
    """A mark across all lanes."""
    told = {"why": restart.why, "done": restart.done, "took_s": restart.took_s}
    name = f"lost {', '.join(restart.roles)}"
    return {"ph": "i", "s": "g", "name": name, "pid": 1, "tid": 1, "ts": round(restart.at_s * 1e6, 3), "args": told}


def _span(event: TraceSpan) -> Span:
    start = event.ts / 1e6
    return Span(
        role=event.cat,
        engine=event.args.engine,
        kind=event.name,
        start=start,
        end=start + event.dur / 1e6,
        version=event.args.version,
        iteration=event.args.iteration,
    )


def _metadata(kind: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
