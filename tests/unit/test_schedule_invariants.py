"""What must hold for every schedule (docs/schedules.md), over random jobs on the virtual clock.

These are whole runs: the schedule's own file, the queue, the roles and the admission code that a real run has, around
simulated engines. Together the properties below look at more than a thousand of them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.config import CostConfig, JobConfig, LengthsConfig, ScheduleConfig
from harness.metrics.samples import SampleRecord
from harness.metrics.timeline import Timeline
from harness.runner.assemble import capacity_rows
from harness.runner.compose import compose_job, make_schedule
from harness.runner.recorder import Recorder
from harness.runner.session import Session
from harness.runner.simulate import simulate
from schedules import SCHEDULES
from schedules.capacity import Capacity

CASES = 150
"""Of each schedule: more than a thousand in all."""


@dataclass
class Run:
    """One finished run and the most rows its queue ever held."""

    config: JobConfig
    recorder: Recorder
    most_rows: int

    @property
    def batch(self) -> int:
        return self.config.algorithm.batch_groups

    @property
    def group(self) -> int:
        return self.config.algorithm.group_size

    @property
    def samples(self) -> list[SampleRecord]:
        return self.recorder.samples()

    @property
    def trained(self) -> list[SampleRecord]:
        return [sample for sample in self.samples if sample.fate == "trained"]


@cache
def base(schedule: str) -> JobConfig:
    return compose_job([f"schedule={schedule}", "backend=virtual", "warmup_iterations=0"])


def play(config: JobConfig, seed: int = 0) -> Run:
    most = [0]

    def watch(session: Session) -> None:
        queue: Any = session.assembly.queue
        create = queue._controller.create

        def created(name: str, rows: Any, group_size: int) -> None:
            create(name, rows, group_size)
            most[0] = max(most[0], queue._controller.live_rows)

        queue._controller.create = created

    recorder = simulate(config, seed, started=watch)
    return Run(config, recorder, most[0])


LENGTHS = st.one_of(
    st.builds(LengthsConfig, kind=st.just("constant"), mean=st.just(100.0), cap=st.just(4000)),
    st.builds(
        LengthsConfig,
        kind=st.just("lognormal"),
        mean=st.just(100.0),
        sigma=st.sampled_from([0.3, 1.0, 2.0]),
        cap=st.sampled_from([400, 4000]),
    ),
)
OPTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "colocate_sync": st.just({}),
    "separated_sync": st.fixed_dictionaries({"streaming": st.booleans()}),
    "one_step_off": st.just({}),
    "delayed_update": st.just({}),
    "half_step": st.fixed_dictionaries({"cohorts": st.integers(2, 3), "partial": st.booleans()}),
    "k_step_off": st.fixed_dictionaries({"k": st.integers(1, 3)}),
    "fully_async": st.fixed_dictionaries(
        {
            "max_staleness": st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2, 4]),
            "partial": st.booleans(),
            "order": st.sampled_from(["fifo", "completion"]),
            "on_stale": st.sampled_from(["drop", "wait"]),
        }
    ),
}


@st.composite
def jobs(draw: st.DrawFn, schedule: str) -> JobConfig:
    """Engines, batches, groups, lengths, rollout against training from 1:5 to 5:1, transfers of 0 to several
    iterations."""
    config = base(schedule)
    options = draw(OPTIONS[schedule])
    engines = draw(st.integers(options.get("cohorts", 1), 5))
    trainers = draw(st.sampled_from([1, 2]))
    micro = draw(st.sampled_from([1, 2]))
    batch = micro * trainers * draw(st.integers(1, 4))
    group = draw(st.integers(2, 4))
    tokens = batch * group * 120.0  # of a batch, about
    speed = draw(st.sampled_from([0.2, 0.5, 1.0, 2.0, 5.0]))  # seconds to generate a batch; training one takes 1
    transfer = draw(st.sampled_from([0.0, 0.05, 0.5, 3.0]))
    per_token = speed * engines / tokens
    cost = CostConfig(
        name="drawn",
        per_billion=False,
        decode_step_s=draw(st.sampled_from([0.2, 1.0])) * per_token,
        decode_step_s_per_sample=per_token,
        prefill_s_per_token=draw(st.sampled_from([0.0, 0.1])) * per_token,
        log_prob_s_per_token=0.1 * trainers / tokens,
        train_s_per_token=0.8 * trainers / tokens,
        train_step_s=0.02,
        call_s=draw(st.sampled_from([0.0, 0.01])),
        weight_bytes=1.0,
        network_bytes_per_s=1.0 / max(transfer, 1e-9),
        host_bytes_per_s=10.0 / max(transfer, 1e-9),
        sync_s=draw(st.sampled_from([0.0, 0.01])),
        offload_s=0.01,
        reload_s=0.01,
        prompt_tokens=20,
        lengths=draw(LENGTHS),
    )
    if schedule == "colocate_sync":
        split: dict[str, int | str] = {
            "actor": trainers,
            "rollout": "actor",
            "actor_fwd": "actor",
            "reference": "actor",
        }
    else:
        split = {
            "rollout": engines,
            "actor": trainers,
            "actor_fwd": "actor",
            "reference": draw(st.sampled_from(["actor", 1])),
        }
    algorithm = replace(config.algorithm, batch_groups=batch, group_size=group, micro_batch_groups=micro)
    return replace(
        config,
        iterations=draw(st.integers(1, 6)),
        schedule=ScheduleConfig(name=schedule, split=split, options=options),
        algorithm=algorithm,
        cost=cost,
        engine=replace(config.engine, slots=draw(st.sampled_from([group, 2 * group, 16 * group]))),
        cluster=replace(config.cluster, devices=16),
    )


def run_of(schedule: str) -> Any:
    """A test over random jobs of this schedule."""
    return given(job=jobs(schedule), seed=st.integers(0, 3))


checked = settings(
    max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


# -- what holds for all


def check_every_sample_once(run: Run) -> None:
    """Trained once or dropped for a reason, groups whole, every batch full, nothing left in flight that must not be."""
    samples, counts = run.samples, run.recorder.ledger.counts()
    assert [sample.sample_id for sample in samples] == list(range(len(samples)))
    run.recorder.ledger.check()
    per_iteration = Counter(sample.trained_iteration for sample in run.trained)
    assert per_iteration == {i: run.batch * run.group for i in range(run.config.iterations)}
    fates: dict[int, set[tuple[str, int | None]]] = {}
    for sample in samples:
        fates.setdefault(sample.group_id, set()).add((sample.fate, sample.trained_iteration))
    assert all(len(fate) == 1 for fate in fates.values()), "a group was torn"
    assert counts["in_flight"] == 0 and counts["dropped_filtered"] == 0


def check_the_queue_is_bounded(run: Run) -> None:
    assert run.most_rows <= capacity_rows(run.config, make_schedule(run.config))


def check_dispatch(run: Run) -> None:
    """No engine started a group before its weights allowed it; drops move the limits on by what was dropped."""
    capacity = Capacity(run.batch, make_schedule(run.config).eta)
    dropped = run.recorder.ledger.counts()["dropped_stale"] // run.group
    for sample in run.trained:
        assert sample.version_first is not None
        assert sample.group_id < capacity.limit(sample.version_first) + dropped


def check_times(run: Run) -> None:
    for sample in run.trained:
        assert sample.admitted_at <= sample.started_at <= sample.finished_at <= sample.trained_at  # type: ignore[operator]


def check_all(run: Run) -> None:
    check_every_sample_once(run)
    check_the_queue_is_bounded(run)
    check_dispatch(run)
    check_times(run)


def lags(run: Run, start: int = 0) -> set[int]:
    """Every token's lag from iteration `start` on: the ends of each sample's range, which hold all between them."""
    late = [sample for sample in run.trained if sample.trained_iteration >= start]  # type: ignore[operator]
    return {s.trained_iteration - v for s in late for v in (s.version_first, s.version_last)}  # type: ignore[operator]


# -- schedule by schedule


@pytest.mark.parametrize("schedule", ["colocate_sync", "separated_sync"])
def test_synchronous_schedules_have_no_lag_at_any_token(schedule: str) -> None:
    @checked
    @run_of(schedule)
    def holds(job: JobConfig, seed: int) -> None:
        run = play(job, seed)
        check_all(run)
        assert lags(run) == {0}

    holds()


@pytest.mark.parametrize("schedule", ["one_step_off", "delayed_update"])
def test_one_step_schedules_lag_by_one_from_the_second_iteration_on(schedule: str) -> None:
    @checked
    @run_of(schedule)
    def holds(job: JobConfig, seed: int) -> None:
        run = play(job, seed)
        check_all(run)
        assert lags(run, start=1) <= {1}
        assert {s.lag_worst for s in run.trained if s.trained_iteration == 0} == {0}

    holds()


@checked
@run_of("k_step_off")
def test_k_steps_off_lag_by_k_and_where_they_stand_in_the_rollout_batch(job: JobConfig, seed: int) -> None:
    run, k = play(job, seed), job.schedule.options["k"]
    check_all(run)
    for sample in run.trained:
        big, place = divmod(sample.trained_iteration, k)  # type: ignore[arg-type]
        assert sample.lag_worst == sample.lag_mean == (k + place if big else place)


@checked
@run_of("fully_async")
def test_fully_async_lags_by_no_more_than_it_admits(job: JobConfig, seed: int) -> None:
    run, options = play(job, seed), job.schedule.options
    check_all(run)
    assert max(lags(run)) <= math.ceil(options["max_staleness"])
    dropped = run.recorder.ledger.counts()["dropped_stale"]
    if options["order"] == "fifo" or options["on_stale"] == "wait":
        assert dropped == 0
    assert dropped % run.group == 0


@checked
@run_of("half_step")
def test_half_step_lags_by_none_or_one_and_by_half_in_the_mean_at_most(job: JobConfig, seed: int) -> None:
    run = play(job, seed)
    check_all(run)
    assert lags(run) <= {0, 1}
    old = math.ceil(run.batch / 2) / run.batch  # a half, where the batch divides by two
    for iteration in range(1, job.iterations):
        means = [s.lag_mean for s in run.trained if s.trained_iteration == iteration]
        assert sum(means) / len(means) <= old + 1e-9  # type: ignore[arg-type]
    assert not all_loading_at_once(run.recorder.timeline, job.schedule.split["rollout"])  # type: ignore[arg-type]


def all_loading_at_once(timeline: Timeline, engines: int) -> bool:
    """Whether there was an instant at which every rollout engine was loading weights."""
    edges = sorted(
        edge
        for span in timeline.spans
        if span.role == "rollout" and span.kind == "load_weights" and span.end > span.start
        for edge in ((span.start, 1), (span.end, -1))
    )
    loading = 0
    for _, change in edges:
        loading += change
        if loading == engines:
            return True
    return False


def test_every_schedule_is_looked_at() -> None:
    assert set(OPTIONS) == set(SCHEDULES)
    assert CASES * len(OPTIONS) > 1000
