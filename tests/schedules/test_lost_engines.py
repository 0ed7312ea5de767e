"""Engines that die, leave and come back in whole runs of every schedule, on the virtual clock: every sample is trained
once all the same, groups are whole, and no token lags by more than the schedule allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from harness.config import JobConfig
from harness.config.compose import make_schedule
from harness.driver.recorder import Recorder
from schedules import SCHEDULES
from schedules.capacity import Capacity
from tests.support.engine_events import Event, simulate_with
from tests.support.examples import examples
from tests.support.invariants import LAGS, Finished, check_dispatch, check_every_sample_once, check_times, lags
from tests.support.random_jobs import jobs, play

checked = settings(max_examples=examples(15, least=10), suppress_health_check=list(HealthCheck))


def engines_of(job: JobConfig) -> int:
    rollout = job.schedule.split["rollout"]
    return int(job.schedule.split["actor"] if rollout == "actor" else rollout)


def go_on(job: JobConfig) -> JobConfig:
    return replace(job, cluster=replace(job.cluster, on_lost_engine="go_on"))


def check(job: JobConfig, recorder: Recorder) -> None:
    """As of any run. What an engine leaves behind may be sampled by newer weights than its schedule has for it."""
    recorder.ledger.check()
    run = Finished(job, recorder.samples(), recorder.ledger.counts(), recorder.timeline)
    check_every_sample_once(run)
    check_dispatch(run)
    check_times(run)
    if job.schedule.name == "delayed_update":
        assert lags(run) <= {0, 1}
    elif job.schedule.name in ("half_step", "fully_async"):
        assert max(lags(run)) <= Capacity(run.batch, make_schedule(job).eta).worst_lag
    else:
        LAGS[job.schedule.name](run)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_run_goes_on_without_engines_that_die_at_any_moment(schedule: str) -> None:
    died = 0

    @checked
    @given(
        job=jobs(schedule),
        seed=st.integers(0, 3),
        moments=st.lists(st.floats(0, 1), min_size=1, max_size=4),
        first=st.integers(0, 4),
    )
    def holds(job: JobConfig, seed: int, moments: list[float], first: int) -> None:
        nonlocal died
        engines = engines_of(job)
        assume(engines > 1)
        ends_at = max(sample.trained_at or 0 for sample in play(job, seed).finished.samples)
        events = [
            Event(moment * ends_at, (first + number) % engines, "dies")
            for number, moment in enumerate(sorted(moments[: engines - 1]))
        ]
        recorder = simulate_with(go_on(job), seed, events, lambda session: None)
        check(go_on(job), recorder)
        assert {told["what"] for told in recorder.engines} <= {"lost"}
        died += len(recorder.engines)

    holds()
    assert died > 5, "the test shows little"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_engines_leave_and_come_back(schedule: str) -> None:
    happened: set[str] = set()

    @checked
    @given(
        job=jobs(schedule),
        seed=st.integers(0, 3),
        leaves=st.floats(0, 0.5),
        joins=st.floats(0.1, 0.9),
        engine=st.integers(0, 4),
        dies=st.booleans(),
    )
    def holds(job: JobConfig, seed: int, leaves: float, joins: float, engine: int, dies: bool) -> None:
        engines = engines_of(job)
        assume(engines > 1 and leaves < joins)
        job = replace(job, iterations=job.iterations + 4)
        ends_at = max(sample.trained_at or 0 for sample in play(job, seed).finished.samples)
        whose = engine % engines
        events = [Event(leaves * ends_at, whose, "leave")]
        events.append(Event(joins * ends_at, whose, "dies" if dies else "join"))
        recorder = simulate_with(go_on(job), seed, events, lambda session: None)
        check(go_on(job), recorder)
        happened.update(told["what"] for told in recorder.engines)

    holds()
    assert happened >= {"leaves", "left", "joins", "works"}
