"""What the page's timeline draws of a run: lanes, arrows of weights, and what is left out of a long one."""

from __future__ import annotations

from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span
from harness.report.page.data import MOST_ENGINES, timeline_data
from harness.report.palette import KINDS

KIND = list(KINDS)
FIELDS = 5


def made_up(iterations: int = 10, engines: int = 2, warmup: int = 2) -> Timeline:
    """Two trainers that publish over a tenth of a second, engines that have loaded a little later."""
    placement = {("rollout", str(n)): Place("rollout", (f"device {n}",)) for n in range(engines)}
    placement |= {("actor", rank): Place("actor", (f"trainer {rank}",)) for rank in "01"}
    timeline = Timeline(placement, warmup=warmup)
    for i in range(iterations):
        spans = [Span("rollout", str(n), "generate", i, i + 0.85, i, i) for n in range(engines)]
        spans += [Span("actor", rank, "publish_weights", i + 0.8, i + 0.9, i + 1, i) for rank in "01"]
        spans += [Span("rollout", str(n), "load_weights", i + 0.8, i + 0.95, i + 1, i) for n in range(engines)]
        timeline.add(spans)
        timeline.end_iteration(i, i + 1.0)
    return timeline


def test_every_span_is_there_once_by_row_and_lane() -> None:
    timeline = made_up()
    data = timeline_data(timeline, "a run")
    assert [(row["role"], row["engine"]) for row in data["rows"]] == list(timeline.placement)
    assert [len(row["lanes"]) for row in data["rows"]] == [2, 2, 1, 1]  # weights arrive while an engine generates
    lane = data["rows"][0]["lanes"][0]
    assert lane[:FIELDS] == [0, 850_000, KIND.index("generate"), 0, 0]
    assert sum(len(lane) for row in data["rows"] for lane in row["lanes"]) == FIELDS * len(timeline.spans)
    assert data["left_out"] == []


def test_arrows_go_from_the_first_trainer_to_every_engine_that_loaded_the_version() -> None:
    arrows = timeline_data(made_up(), "a run")["arrows"]
    assert len(arrows) == 20
    assert arrows[:2] == [[2, 0, 800_000, 950_000, 1], [2, 1, 800_000, 950_000, 1]]


def test_weights_that_nobody_published_have_no_arrow() -> None:
    timeline = Timeline({("rollout", "0"): Place("rollout", ("device 0",))})
    timeline.add([Span("rollout", "0", "load_weights", 0.0, 0.5, 0, 0)])
    timeline.end_iteration(0, 1.0)
    assert timeline_data(timeline, "a run")["arrows"] == []


def test_at_first_some_iterations_after_the_warm_up_are_shown() -> None:
    assert timeline_data(made_up(10), "a run")["window"] == [2_000_000, 8_000_000]
    assert timeline_data(made_up(5), "a run")["window"] == [0, 5_000_000]


def test_of_a_long_run_whole_iterations_are_left_out_and_counted() -> None:
    timeline = made_up(100)
    data = timeline_data(timeline, "a run", most=100)
    assert data["end"] == 16_000_000 and data["ends"][-1] == [15, 16_000_000]  # six spans each
    assert sum(len(lane) for row in data["rows"] for lane in row["lanes"]) == FIELDS * 96
    assert data["left_out"] == [
        "Only the first 16 of 100 iterations are here; 504 later spans stand in the run's trace.json."
    ]


def test_of_many_engines_some_have_a_row() -> None:
    data = timeline_data(made_up(3, engines=20), "a run")
    assert len(data["rows"]) == MOST_ENGINES + 2
    assert data["left_out"] == ["rollout: 16 of 20 engines have a row."]
    assert {arrow[1] for arrow in data["arrows"]} == set(range(MOST_ENGINES))
