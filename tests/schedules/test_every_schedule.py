"""What must hold of every schedule (docs/schedules.md), of those here and of your own: `make test-schedule SCHEDULE=`.

Whole runs on the virtual clock over random jobs: the schedule's own file, the queue, the roles and the admission code
that a real run has, around simulated engines; some of which die, leave, and come back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from harness.acceptance.chaos.jobs import base, with_options
from harness.checks.layout import capacity_rows
from harness.comparison.conservation import check_conservation
from harness.comparison.promises import FinishedRun
from harness.config import JobConfig
from harness.config.compose import make_schedule
from harness.config.registries import ORDERS, TRANSPORTS
from harness.config.transports import transport_of
from harness.driver.recorder import Recorder
from schedules import Schedule
from tests.support import invariants
from tests.support.engine_events import Event, simulate_with
from tests.support.examples import examples
from tests.support.fake_job import FakeJob
from tests.support.random_jobs import jobs, options_of, play

checked = settings(suppress_health_check=list(HealthCheck))
few = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))


def made(schedule: str) -> Schedule:
    """With its defaults."""
    return make_schedule(base(schedule))


# -- what it says of itself


def test_a_schedule_says_how_weights_travel_and_how_stale_it_is(schedule: str) -> None:
    @checked
    @given(options_of(type(made(schedule))))
    def holds(options: dict[str, object]) -> None:
        own = make_schedule(with_options(base(schedule), options))
        assert own.transport in TRANSPORTS and own.order in ORDERS
        assert own.eta >= 0 and own.least_engines >= 1 and own.cycle >= 1
        for iteration in range(3 * own.cycle):
            least, worst = own.lag_bounds(iteration)
            assert 0 <= least <= worst <= min(iteration, math.ceil(own.eta))

    holds()
    assert type(made(schedule)).__doc__


# -- what it asks of a job


async def test_every_version_is_made_known_once_and_in_order(schedule: str) -> None:
    log = await FakeJob(iterations=5).play(made(schedule))
    assert [line.split()[1] for line in log.of("publish", "send", "mark")] == ["1", "2", "3", "4", "5"]
    assert log.of("train") == [f"train {i}" for i in range(5)]


async def test_engines_forget_weights_only_where_new_ones_come_before_the_next_batch(schedule: str) -> None:
    own = made(schedule)
    log = await FakeJob(iterations=5).play(own)
    if own.loads_after_each_batch:
        assert own.colocated
        kinds = [line.split()[0] for line in log.of("generate", "complete", "publish")]
        assert kinds == ["complete" if own.awaits_completion else "generate", "publish"] * 5


async def test_a_job_of_one_iteration_ends(schedule: str) -> None:
    log = await FakeJob(iterations=1).play(made(schedule))
    assert log.of("train") == ["train 0"]


async def test_the_first_failure_ends_every_schedule(schedule: str) -> None:
    with pytest.raises((ArithmeticError, ExceptionGroup)) as caught:
        await FakeJob(fail_at=2).play(made(schedule))
    error: BaseException = caught.value
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert str(error) == "the loss of iteration 2 is not finite"


# -- whole runs


def check(job: JobConfig, seed: int) -> float:
    """It ends, its queue stayed within its bound, everything of tests/support/invariants.py holds, and every sample and
    token is accounted for. When the last sample was trained."""
    run = play(job, seed)
    assert run.most_rows <= capacity_rows(job, make_schedule(job))
    invariants.check_run(run.finished)
    invariants.check_devices(run.finished)
    assert check_conservation([run.files]).problems == ()
    check_critic(job, run.metrics)
    return max(sample.trained_at or 0 for sample in run.finished.samples)


def check_critic(job: JobConfig, metrics: Sequence[Mapping[str, float]]) -> None:
    """Whoever has values of a sample has seen all that whoever sampled it learnt from: so they lag no more."""
    for iteration, found in enumerate(metrics if job.algorithm.has_critic else ()):
        assert 0 <= found["critic/lag"] <= found["critic/lag_max"] <= make_schedule(job).lag_bounds(iteration)[1]
        assert found["time/update_critic_s"] > 0 and found["time/values_s"] > 0


def engines_of(job: JobConfig) -> int:
    rollout = job.schedule.split["rollout"]
    return int(job.schedule.split["actor"] if rollout == "actor" else rollout)


def go_on(job: JobConfig) -> JobConfig:
    return replace(job, cluster=replace(job.cluster, on_lost_engine="go_on"))


def check_with_lost_engines(job: JobConfig, recorder: Recorder) -> None:
    """As of any run. What an engine leaves behind may be sampled by newer weights than its schedule has for it."""
    recorder.ledger.check()
    run = FinishedRun(job, recorder.samples(), recorder.ledger.counts(), recorder.timeline)
    invariants.check_every_sample_once(run)
    invariants.check_dispatch(run)
    invariants.check_times(run)
    invariants.check_lags(run, newer=transport_of(make_schedule(job).transport).staged)


def test_what_is_promised_holds_over_random_jobs_and_where_engines_die_at_any_moment(schedule: str) -> None:
    died = 0

    @few
    @given(
        job=jobs(schedule),
        seed=st.integers(0, 3),
        moments=st.lists(st.floats(0, 1), min_size=1, max_size=4),
        first=st.integers(0, 4),
    )
    def holds(job: JobConfig, seed: int, moments: list[float], first: int) -> None:
        nonlocal died
        ends_at, engines = check(job, seed), engines_of(job)
        events = [
            Event(moment * ends_at, (first + number) % engines, "dies")
            for number, moment in enumerate(sorted(moments[: engines - 1]))
        ]
        if events:
            recorder = simulate_with(go_on(job), seed, events, lambda session: None)
            check_with_lost_engines(go_on(job), recorder)
            assert {told["what"] for told in recorder.engines} <= {"lost"}
            died += len(recorder.engines)

    holds()
    assert died > 2, "the test shows little"


@pytest.mark.slow
def test_engines_leave_and_come_back(schedule: str) -> None:
    happened: set[str] = set()

    @settings(few, max_examples=examples(30))
    @given(
        job=jobs(schedule),
        seed=st.integers(0, 3),
        leaves=st.floats(0, 0.25),
        joins=st.floats(0.4, 0.8),
        engine=st.integers(0, 4),
        dies=st.sampled_from([False, False, False, True]),  # what is drawn depends on what else was imported
    )
    def holds(job: JobConfig, seed: int, leaves: float, joins: float, engine: int, dies: bool) -> None:
        engines = engines_of(job)
        assume(engines > 1)
        job = replace(job, iterations=job.iterations + 4)
        ends_at = check(job, seed)
        whose = engine % engines
        events = [Event(leaves * ends_at, whose, "leave")]
        events.append(Event(joins * ends_at, whose, "dies" if dies else "join"))
        recorder = simulate_with(go_on(job), seed, events, lambda session: None)
        check_with_lost_engines(go_on(job), recorder)
        happened.update(told["what"] for told in recorder.engines)

    holds()
    assert happened >= {"leaves", "left", "joins", "works"}
