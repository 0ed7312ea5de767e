"""Intervals, busy and idle time, the bound, phase times, and the trace that holds them."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics import timeline as timelines
from harness.metrics.definitions import check_names
from harness.metrics.schemas import Restart, TraceFile
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span

TICKS = st.integers(0, 30).map(float)
INTERVALS = st.lists(st.tuples(TICKS, TICKS).map(lambda pair: (min(pair), max(pair))), max_size=8)


def covered(intervals: list[timelines.Interval]) -> set[float]:
    """The unit ticks inside the intervals: a slow, obvious model of them."""
    return {tick for tick in range(30) for start, end in intervals if start <= tick and tick + 1 <= end}


@given(INTERVALS)
def test_a_union_is_sorted_disjoint_and_covers_the_same_time(intervals: list[timelines.Interval]) -> None:
    merged = timelines.union(intervals)
    assert all(end < start for (_, end), (start, _) in zip(merged, merged[1:], strict=False))
    assert covered(merged) == covered(intervals)
    assert timelines.length(intervals) == len(covered(intervals))


@given(INTERVALS, INTERVALS)
def test_a_difference_is_in_the_first_and_not_in_the_second(
    first: list[timelines.Interval], second: list[timelines.Interval]
) -> None:
    assert covered(timelines.subtract(first, second)) == covered(first) - covered(second)


@given(INTERVALS, st.tuples(TICKS, TICKS).map(lambda pair: (min(pair), max(pair))))
def test_clipping_keeps_what_is_in_the_window(intervals: list[timelines.Interval], window: timelines.Interval) -> None:
    assert covered(timelines.clip(intervals, window)) == covered(intervals) & covered([window])


def span(
    role: str, kind: str, start: float, end: float, *, engine: str = "0", iteration: int = 1, version: int = 0
) -> Span:
    return Span(role, engine, kind, start, end, version, iteration)


def separated(warmup: int = 0) -> Timeline:
    """Two rollout engines and an actor with pools of their own; two iterations of 10 s."""
    timeline = Timeline(
        {
            ("rollout", "0"): Place("rollout", ("r0",)),
            ("rollout", "1"): Place("rollout", ("r1",)),
            ("actor", "0"): Place("actor", ("a0",)),
        },
        warmup=warmup,
    )
    timeline.add(
        [
            span("rollout", "generate", 0, 8),
            span("rollout", "generate", 0, 4, engine="1"),
            span("actor", "wait_for_samples", 0, 5),
            span("actor", "update_actor", 5, 8),
            span("actor", "update_actor", 7, 9),  # overlaps: seconds 7 to 8 count once as busy
            span("rollout", "generate", 8, 20, iteration=2),
            span("actor", "update_actor", 19, 20, iteration=2),
        ]
    )
    timeline.end_iteration(1, 10.0)
    timeline.end_iteration(2, 20.0)
    return timeline


def test_busy_time_is_a_union_idle_is_the_rest_and_waiting_is_no_work() -> None:
    timeline = separated()
    assert timeline.busy_seconds("rollout", (0, 10)) == (10 + 4) / 2
    assert timeline.busy_seconds("actor", (0, 10)) == 4
    timeline = separated()
    assert timeline.idle("rollout", (0, 10)) == pytest.approx(0.3)
    assert timeline.idle("actor", (0, 10)) == pytest.approx(0.6)
    assert timeline.idle("actor") == pytest.approx(1 - 5 / 20)
    timeline = Timeline({("actor", "0"): Place("actor", ("a0",))})
    timeline.add([span("actor", "wait_for_samples", 0, 10)])
    assert timelines.KINDS - timelines.WORK_KINDS == {"wait_for_samples", "stage_weights"}
    assert timeline.idle("actor", (0, 10)) == 1.0
    timeline = Timeline({("actor", "0"): Place("a", ("a0",)), ("reference", "0"): Place("r", ("r0",))})
    timeline.add([span("reference", "wait_for_samples", 0, 9), span("actor", "wait_for_samples", 0, 2)])
    timeline.end_iteration(1, 10.0)
    assert timeline.iteration_metrics(1)["time/wait_for_samples_s"] == 2


def test_the_bound_is_the_work_of_the_busiest_pool_under_known_names() -> None:
    timeline = separated()
    assert timeline.fraction_of_bound((0, 10)) == pytest.approx(0.7)  # rollout; the actor's pool worked .4
    assert timeline.fraction_of_bound((18, 20)) == pytest.approx(0.5)
    check_names(separated().iteration_metrics(1))
    timeline = separated(warmup=1)
    assert timeline.steady_window() == (10.0, 20.0)
    assert (timeline.idle("rollout"), timeline.idle("actor")) == (pytest.approx(0.5), pytest.approx(0.9))
    assert timeline.fraction_of_bound() == pytest.approx(0.5)
    assert separated(warmup=2).steady_window() == (0.0, 20.0)
    with pytest.raises(ValueError, match="has no length"):
        Timeline({("actor", "0"): Place("actor", ("a0",))}).idle("actor")
    with pytest.raises(ValueError, match="iteration 3 ends at 5.0 s"):
        separated().end_iteration(3, 5.0)


def test_devices_that_are_shared_doubled_or_unused_count_for_every_role_on_them() -> None:
    shared = Place("pool", ("gpu0",))
    timeline = Timeline({("rollout", "0"): shared, ("actor", "0"): shared})
    timeline.add([span("rollout", "generate", 0, 6), span("actor", "update_actor", 6, 9)])
    assert timeline.idle("rollout", (0, 10)) == timeline.idle("actor", (0, 10)) == pytest.approx(0.1)
    assert timeline.busy_seconds("rollout", (0, 10)) == 6
    assert timeline.fraction_of_bound((0, 10)) == pytest.approx(0.9)
    timeline = Timeline({("actor", str(rank)): Place("actor", (f"a{rank}",)) for rank in range(4)})
    timeline.add([span("actor", "update_actor", 0, 8)])
    assert timeline.idle("actor", (0, 8)) == 0.75
    assert timeline.fraction_of_bound((0, 8)) == 0.25
    timeline = Timeline({("rollout", "0"): Place("rollout", ("r0", "r1"))})
    timeline.add([span("rollout", "generate", 0, 3)])
    assert timeline.busy_seconds("rollout", (0, 10)) == 3


def test_phase_times_are_seconds_per_engine_of_the_iteration_that_the_spans_carry() -> None:
    metrics = separated().iteration_metrics(1)
    assert metrics["time/iteration_s"] == 10
    assert metrics["time/generate_s"] == (8 + 4) / 2
    assert metrics["time/update_actor_s"] == 3 + 2
    assert metrics["time/wait_for_samples_s"] == 5
    assert metrics["time/reference_s"] == 0
    assert separated().iteration_metrics(2)["time/generate_s"] == 12


def test_a_weight_sync_is_exposed_only_where_a_device_does_nothing_else() -> None:
    timeline = Timeline({("rollout", "0"): Place("rollout", ("r0",)), ("actor", "0"): Place("actor", ("a0",))})
    timeline.add(
        [
            span("rollout", "generate", 0, 6),
            span("rollout", "load_weights", 4, 7),  # two seconds of it beside generation
            span("actor", "update_actor", 0, 5),
            span("actor", "publish_weights", 3, 4),  # hidden behind the update
        ]
    )
    timeline.end_iteration(1, 10.0)
    metrics = timeline.iteration_metrics(1)
    assert metrics["time/weight_sync_s"] == 4
    assert metrics["time/weight_sync_exposed_s"] == 0.5, "one second of one of two devices"


def test_engines_that_load_in_turn_expose_no_more_than_engines_that_load_at_once() -> None:
    exposed = []
    for second in (0, 1):
        timeline = Timeline({("rollout", n): Place("rollout", (f"r{n}",)) for n in "01"})
        timeline.add(
            [span("rollout", "load_weights", start, start + 1, engine=n) for n, start in (("0", 0), ("1", second))]
        )
        timeline.end_iteration(1, 10.0)
        exposed.append(timeline.iteration_metrics(1)["time/weight_sync_exposed_s"])
    assert exposed == [1, 1]


def test_weights_that_travel_in_the_background_are_a_sync_that_is_never_exposed_and_no_work() -> None:
    timeline = Timeline({("rollout", "0"): Place("rollout", ("r0",)), ("actor", "0"): Place("actor", ("a0",))})
    timeline.add(
        [
            span("actor", "publish_weights", 0, 1),
            # Both windows have some of it; beside it are generation, a load, and nothing.
            span("rollout", "stage_weights", 1, 6, iteration=2),
            span("rollout", "generate", 2, 3),
            span("rollout", "load_weights", 3, 4),
            span("rollout", "stage_weights", 9, 10, iteration=2),
        ]
    )
    timeline.end_iteration(1, 5.0)
    timeline.end_iteration(2, 10.0)
    first, second = timeline.iteration_metrics(1), timeline.iteration_metrics(2)
    assert (first["time/weight_sync_s"], second["time/weight_sync_s"]) == (5, 2)
    assert (first["time/weight_sync_exposed_s"], second["time/weight_sync_exposed_s"]) == (1, 0)
    assert (first["idle/rollout"], second["idle/rollout"]) == (pytest.approx(0.6), 1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            ("critic", "generate", 0, 1),
            "span of critic/0, which has no place; placed are rollout/0, rollout/1, actor/0",
        ),
        (("actor", "idle_loop", 0, 1), "unknown kind of span 'idle_loop'"),
        (("actor", "update_actor", 2, 1), "ends before it starts"),
    ],
)
def test_a_span_that_cannot_be_is_refused(wrong: tuple[str, str, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        separated().add([span(*wrong)])


def test_a_timeline_and_its_trace_are_made_of_each_other() -> None:
    trace = json.loads(json.dumps(timelines.chrome_trace(separated())))
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["actor", "rollout"]
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    first = next(e for e in slices if names[e["pid"]] == "rollout" and threads[e["pid"], e["tid"]] == "1")
    assert (first["name"], first["ts"], first["dur"]) == ("generate", 0.0, 4e6)
    assert first["args"] == {"engine": "1", "version": 0, "iteration": 1}
    assert len(slices) == 7
    timeline = separated(warmup=1)
    restart = Restart(["reward[0]"], "killed by signal 9", "started again", at_s=2.5, took_s=0.3)
    trace = json.loads(json.dumps(timelines.chrome_trace(timeline, [restart])))
    (mark,) = (event for event in trace["traceEvents"] if event["ph"] == "i")
    assert (mark["name"], mark["ts"], mark["args"]["took_s"]) == ("lost reward[0]", 2.5e6, 0.3)
    again = timelines.timeline_of(msgspec.convert(trace, TraceFile))
    assert again.spans == timeline.spans
    assert again.placement == timeline.placement
    assert again.steady_window() == timeline.steady_window()


def test_spans_that_overlap_have_lanes_of_their_own() -> None:
    by_thread: dict[tuple[int, int], list[dict]] = {}
    for event in timelines.chrome_trace(separated())["traceEvents"]:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(by_thread) == 4  # the actor's overlapping update has a thread of its own
    for events in by_thread.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(events, events[1:], strict=False))
    a, b, c = (span("actor", "update_actor", *times) for times in ((0, 2), (2, 4), (3, 5)))
    assert timelines.lanes([c, b, a]) == [[a, b], [c]]
    assert timelines.lanes([]) == []


def test_lanes_of_spans_that_all_overlap_cost_a_few_comparisons_each() -> None:
    compared = 0

    class Counted(float):
        def _count(self, verb: str, other: float) -> bool:
            nonlocal compared
            compared += 1
            return bool(getattr(float, verb)(self, other))

        def __lt__(self, other: float) -> bool:
            return self._count("__lt__", other)

        def __le__(self, other: float) -> bool:
            return self._count("__le__", other)

        def __eq__(self, other: object) -> bool:
            return self._count("__eq__", other)  # type: ignore[arg-type]

        __hash__ = float.__hash__

    spans = [span("actor", "update_actor", Counted(row), Counted(3_000 + row % 7)) for row in range(1_000)]
    assert len(timelines.lanes(spans)) == 1_000 and compared < 30 * len(spans)
