"""What holds of some schedules over random jobs on the virtual clock, besides what holds of every one."""

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.acceptance.chaos.jobs import OBSERVATIONS, base, with_options
from harness.comparison.promises import FinishedRun
from harness.config import JobConfig, LatencyConfig, LengthsConfig, ScheduleConfig
from harness.config.compose import make_schedule
from schedules import Schedule
from schedules.fully_async import FullyAsync
from schedules.partial_rollout_sync import PartialRolloutSync
from schedules.protocol import PauseMode
from tests.support import invariants
from tests.support.engine_events import Event, simulate_with
from tests.support.examples import examples
from tests.support.random_jobs import jobs, play, without_limit

checked = settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))


SYNCHRONOUS = {
    "colocate_sync": {},
    "separated_sync": {"streaming": True},
    "fully_async": {"max_staleness": 0, "pause": "keep", "order": "fifo", "on_stale": "wait"},
}


@checked
@given(job=jobs("separated_sync"), seed=st.integers(0, 3))
def test_without_staleness_the_schedules_train_the_same_samples_in_the_same_batches(job: JobConfig, seed: int) -> None:
    """Samples have the same lengths, whoever generates them and when."""
    trained = []
    for schedule, options in SYNCHRONOUS.items():
        split = dict(job.schedule.split)
        if schedule == "colocate_sync":
            split = base(schedule).schedule.split | {"actor": split["actor"]}
        its = replace(job, schedule=ScheduleConfig(name=schedule, split=split, options=options))
        run = play(without_limit(its), seed).finished
        invariants.check_run(run)
        trained.append([(s.sample_id, s.trained_iteration, s.response_tokens) for s in run.trained])
    assert trained[0] == trained[1] == trained[2]


@pytest.mark.parametrize("schedule", ["fully_async", "half_step"])
def test_samples_of_several_turns_live_through_an_update_only_where_a_pause_keeps_them(schedule: str) -> None:
    config = base(schedule)
    small = replace(config.algorithm, batch_groups=4, micro_batch_groups=1)
    config = replace(config, iterations=3, algorithm=small, cluster=replace(config.cluster, devices=4))
    turns = LengthsConfig(kind="constant", mean=4.0, cap=8)
    cost = replace(config.cost, turns=turns, observation_tokens=OBSERVATIONS, tool_latency=LatencyConfig(mean=0.5))
    spans = {}
    for mode in get_args(PauseMode):
        run = play(with_options(replace(config, cost=cost), {"pause": mode})).finished
        invariants.check_run(run)
        spans[mode] = {sample.span for sample in run.trained}
    assert max(spans["keep"]) > 1 and max(spans["carry"]) > 1  # type: ignore[type-var]
    assert spans["wait"] == spans["abort"] == {1}


@pytest.mark.parametrize(
    ("preset", "schedule"),
    [
        ("periodic_publication", FullyAsync(publish_every=4, max_staleness=3)),
        ("pipeline_k", FullyAsync(max_staleness=8)),
        ("colocate_async", PartialRolloutSync(over=1.0, max_staleness=7)),
    ],
)
def test_what_others_call_otherwise_is_a_schedule_with_settings(preset: str, schedule: Schedule) -> None:
    config = base(preset)
    assert make_schedule(config) == schedule
    run = play(replace(config, iterations=4)).finished
    invariants.check_run(run)
    assert any(sample.lag_worst for sample in run.trained)


def test_groups_are_overtaken_by_fewer_than_a_window() -> None:
    config = base("windowed")
    lengths = LengthsConfig(kind="lognormal", mean=300.0, sigma=1.0, cap=4000)
    config = replace(config, iterations=6, cost=replace(config.cost, lengths=lengths))
    overtaken = []
    for window in (0, 0.25, 6):
        run = play(with_options(config, {"max_staleness": 2.0, "window": window})).finished
        invariants.check_run(run)
        begins = [(sample.group_id, run.batch * sample.trained_iteration) for sample in run.trained]
        overtaken.append(max(begin - group for group, begin in begins))  # at least so far, before its batch
        assert overtaken[-1] <= window * run.batch
    assert 0 == overtaken[0] < overtaken[1] < overtaken[2]


def test_what_lends_nothing_is_fully_async_to_the_moment_and_what_lends_is_faster_where_samples_are_short() -> None:
    config = base("lending")
    small = replace(config.algorithm, batch_groups=16, micro_batch_groups=1)
    split, engine = config.schedule.split | {"rollout": 1, "actor": 4}, replace(config.engine, slots=24)
    config = replace(config, iterations=6, algorithm=small, cluster=replace(config.cluster, devices=5), engine=engine)
    lending = replace(config, schedule=replace(config.schedule, split=split))
    del (apart := dict(split))["lent"]
    options = base("fully_async").schedule.options
    streamed = replace(lending, schedule=ScheduleConfig("fully_async", apart, options))
    order = {"order": "completion"}
    made = with_options(lending, {"share": 0.0} | order), with_options(streamed, order), with_options(lending, order)
    runs = [play(job).finished for job in made]
    for run in runs:
        invariants.check_run(run)
        invariants.check_devices(run)
    of_samples = [[(one.sample_id, one.started_at, one.trained_at) for one in run.samples] for run in runs[:2]]
    assert of_samples[0] == of_samples[1]
    assert {span.kind for span in runs[2].timeline.spans if span.role == "lent"} == {"generate", "load_weights"}
    assert runs[2].timeline.elapsed_window()[1] < 0.9 * runs[1].timeline.elapsed_window()[1]


@checked
@given(job=jobs("half_step"), seed=st.integers(0, 3))
def test_half_step_lags_by_half_an_iteration_one_cohort_at_a_time(job: JobConfig, seed: int) -> None:
    run, schedule = play(job, seed).finished, make_schedule(job)
    old = math.ceil(run.batch / 2) / run.batch  # a half, where the batch divides by two
    for iteration in range(1, run.config.iterations):
        means = [s.lag_mean for s in run.trained if s.trained_iteration == iteration]
        assert sum(means) / len(means) <= old + 1e-9  # type: ignore[arg-type]
    engines = len([role for role, _ in run.timeline.placement if role == "rollout"])
    assert invariants.most_loading_at_once(run.timeline) <= math.ceil(engines / schedule.cohorts) < engines


STREAM = "tests.support.colocated_stream:ColocatedStream"
exclusive_devices_checked = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@exclusive_devices_checked
@given(job=jobs(STREAM), moment=st.floats(0, 1), seed=st.integers(0, 3))
def test_roles_that_stream_on_one_pool_take_turns_and_an_engine_that_dies_leaves_its_device_to_the_others(
    job: JobConfig, moment: float, seed: int
) -> None:
    """They take no less than their work."""
    job = replace(job, cluster=replace(job.cluster, on_lost_engine="go_on"))
    run = play(job, seed).finished
    invariants.check_run(run)
    invariants.check_devices(run)
    end = run.timeline.elapsed_window()[1]  # spares may be generated beyond it
    for device, spans in invariants.spans_by_device(run).items():
        work = sum(min(span.end, end) - span.start for span in spans if span.start < end)
        if device.startswith("device"):
            assert {span.role for span in spans} >= {"rollout", "actor", "actor_fwd", "reference"}
            assert work <= end * (1 + 1e-9)
    if int(job.schedule.split["actor"]) > 1:
        event = Event(moment * max(sample.trained_at or 0 for sample in run.samples), 0, "dies")
        recorder = simulate_with(job, seed, [event], lambda session: None)
        run = FinishedRun(job, recorder.samples(), recorder.ledger.counts(), recorder.timeline)
        invariants.check_every_sample_once(run)
        invariants.check_devices(run)
