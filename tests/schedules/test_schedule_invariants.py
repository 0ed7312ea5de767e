"""What must hold for every schedule (docs/schedules.md), over random jobs on the virtual clock.

These are whole runs: the schedule's own file, the queue, the roles and the admission code that a real run has, around
simulated engines. In CI the properties below look at more than a thousand of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.config import JobConfig, ScheduleConfig
from harness.config.compose import make_schedule
from harness.driver.assemble import capacity_rows
from schedules import SCHEDULES
from tests.support.examples import examples
from tests.support.invariants import LAGS, Finished, check_run
from tests.support.random_jobs import OPTIONS, base, jobs, play


def run_of(schedule: str) -> Any:
    """A test over random jobs of this schedule."""
    return given(job=jobs(schedule), seed=st.integers(0, 3))


checked = settings(suppress_health_check=list(HealthCheck))


def check(job: JobConfig, seed: int) -> Finished:
    """It ends, its queue stayed within its bound, and everything of tests/support/invariants.py holds."""
    run = play(job, seed)
    assert run.most_rows <= capacity_rows(job, make_schedule(job))
    check_run(run.finished)
    return run.finished


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_what_is_promised_of_the_schedule_holds_over_random_jobs(schedule: str) -> None:
    @checked
    @run_of(schedule)
    def holds(job: JobConfig, seed: int) -> None:
        check(job, seed)

    holds()


SYNCHRONOUS = {
    "colocate_sync": {},
    "separated_sync": {"streaming": True},
    "fully_async": {"max_staleness": 0, "partial": True, "order": "fifo", "on_stale": "wait"},
}


@settings(checked, max_examples=examples(25))
@given(job=jobs("separated_sync"), seed=st.integers(0, 3))
def test_without_staleness_the_schedules_train_the_same_samples_in_the_same_batches(job: JobConfig, seed: int) -> None:
    """Samples have the same lengths, whoever generates them and when."""
    trained = []
    for schedule, options in SYNCHRONOUS.items():
        split = dict(job.schedule.split)
        if schedule == "colocate_sync":
            split = base(schedule).schedule.split | {"actor": split["actor"]}
        its = replace(job, schedule=ScheduleConfig(name=schedule, split=split, options=options))
        trained.append([(s.sample_id, s.trained_iteration, s.response_tokens) for s in check(its, seed).trained])
    assert trained[0] == trained[1] == trained[2]


def test_every_schedule_is_looked_at() -> None:
    assert set(OPTIONS) == set(LAGS) == set(SCHEDULES)
