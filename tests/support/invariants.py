"""What must hold of a finished run under its schedule (docs/schedules.md), whatever clock it ran on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.config import JobConfig, job_config
from harness.config.compose import make_schedule
from harness.metrics.run_files import load_ledger, load_samples, load_timeline
from harness.metrics.samples import SampleRecord, record_of
from harness.metrics.timeline import Timeline
from schedules.capacity import Capacity

ROUNDED_S = 2e-6


@dataclass(frozen=True)
class Finished:
    """A run that came to its end: what was asked, and what was recorded. counts: samples by fate."""

    config: JobConfig
    samples: list[SampleRecord]
    counts: Mapping[str, int]
    timeline: Timeline

    @property
    def batch(self) -> int:
        return self.config.algorithm.batch_groups

    @property
    def group(self) -> int:
        return self.config.algorithm.group_size

    @property
    def trained(self) -> list[SampleRecord]:
        return [sample for sample in self.samples if sample.fate == "trained"]


def read_run(folder: Path) -> Finished:
    """From the files of a run."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    ledger = load_ledger(folder)
    fates = ("admitted", "trained", "dropped_stale", "dropped_filtered", "in_flight")
    return Finished(
        job_config(tree),
        [record_of(row) for row in load_samples(folder).to_pylist()],
        {fate: ledger[fate] for fate in fates},
        load_timeline(folder),
    )


def check_run(run: Finished) -> None:
    """Everything that holds for all schedules, and what holds for this one."""
    check_every_sample_once(run)
    check_dispatch(run)
    check_times(run)
    LAGS[run.config.schedule.name](run)


# -- what holds for all


def check_every_sample_once(run: Finished) -> None:
    """Trained once or dropped for a reason, groups whole, every batch full, nothing left in flight, closed books."""
    assert [sample.sample_id for sample in run.samples] == list(range(len(run.samples)))
    per_iteration = Counter(sample.trained_iteration for sample in run.trained)
    assert per_iteration == {i: run.batch * run.group for i in range(run.config.iterations)}
    fates: dict[int, set[tuple[str, int | None]]] = {}
    for sample in run.samples:
        fates.setdefault(sample.group_id, set()).add((sample.fate, sample.trained_iteration))
    assert all(len(fate) == 1 for fate in fates.values()), "a group was torn"
    assert set(Counter(sample.group_id for sample in run.samples).values()) == {run.group}
    left = {fate: count for fate, count in run.counts.items() if fate != "admitted"}
    assert run.counts["admitted"] == len(run.samples) == sum(left.values())
    assert Counter(sample.fate for sample in run.samples) == {fate: count for fate, count in left.items() if count}
    assert run.counts["in_flight"] == run.counts["dropped_filtered"] == 0


def check_dispatch(run: Finished) -> None:
    """No engine started a group before its weights allowed it; drops move the limits on by what was dropped."""
    capacity = Capacity(run.batch, make_schedule(run.config).eta)
    dropped = run.counts["dropped_stale"] // run.group
    for sample in run.trained:
        assert sample.version_first is not None
        assert sample.group_id < capacity.limit(sample.version_first) + dropped


def check_times(run: Finished) -> None:
    for sample in run.trained:
        assert sample.admitted_at <= sample.started_at <= sample.finished_at <= sample.trained_at  # type: ignore[operator]


def lags(run: Finished, start: int = 0) -> set[int]:
    """Every token's lag from iteration `start` on: the ends of each sample's range, which hold all between them."""
    late = [sample for sample in run.trained if sample.trained_iteration >= start]  # type: ignore[operator]
    return {s.trained_iteration - v for s in late for v in (s.version_first, s.version_last)}  # type: ignore[operator]


# -- schedule by schedule


def no_lag_at_any_token(run: Finished) -> None:
    assert lags(run) == {0}
    check_fifo(run)


def a_lag_of_one_from_the_second_iteration_on(run: Finished) -> None:
    assert lags(run, start=1) <= {1}
    assert {s.lag_worst for s in run.trained if s.trained_iteration == 0} == {0}
    check_fifo(run)


def a_lag_of_k_and_the_place_in_the_rollout_batch(run: Finished) -> None:
    k = make_schedule(run.config).k  # type: ignore[attr-defined]
    for sample in run.trained:
        big, place = divmod(sample.trained_iteration, k)  # type: ignore[arg-type]
        assert sample.lag_worst == sample.lag_mean == (k + place if big else place)
    check_fifo(run)


def none_or_one_and_at_most_a_half_in_the_mean(run: Finished) -> None:
    """Besides, no more than one cohort of engines loads weights at a time."""
    assert lags(run) <= {0, 1}
    old = math.ceil(run.batch / 2) / run.batch  # a half, where the batch divides by two
    for iteration in range(1, run.config.iterations):
        means = [s.lag_mean for s in run.trained if s.trained_iteration == iteration]
        assert sum(means) / len(means) <= old + 1e-9  # type: ignore[arg-type]
    engines = len([role for role, _ in run.timeline.placement if role == "rollout"])
    cohorts: int = make_schedule(run.config).cohorts  # type: ignore[attr-defined]
    assert most_loading_at_once(run.timeline) <= math.ceil(engines / cohorts) < engines
    check_fifo(run)


def no_more_than_was_admitted(run: Finished) -> None:
    """The bound of `fully_async`; only completion order overtakes, and only to drop when told to."""
    schedule: Any = make_schedule(run.config)
    assert max(lags(run)) <= math.ceil(schedule.max_staleness)
    assert run.counts["dropped_stale"] % run.group == 0
    if schedule.order == "fifo" or schedule.on_stale == "wait":
        assert run.counts["dropped_stale"] == 0
    if schedule.order == "fifo":
        check_fifo(run)


LAGS: dict[str, Callable[[Finished], None]] = {
    "colocate_sync": no_lag_at_any_token,
    "separated_sync": no_lag_at_any_token,
    "one_step_off": a_lag_of_one_from_the_second_iteration_on,
    "delayed_update": a_lag_of_one_from_the_second_iteration_on,
    "k_step_off": a_lag_of_k_and_the_place_in_the_rollout_batch,
    "half_step": none_or_one_and_at_most_a_half_in_the_mean,
    "fully_async": no_more_than_was_admitted,
}


def check_fifo(run: Finished) -> None:
    """Group N is trained in iteration N // batch."""
    assert all(sample.trained_iteration == sample.group_id // run.batch for sample in run.samples)


def most_loading_at_once(timeline: Timeline) -> int:
    """The most rollout engines that were loading weights at one instant; what trace.json rounds is no overlap."""
    edges = sorted(
        edge
        for span in timeline.spans
        if span.role == "rollout" and span.kind == "load_weights" and span.end - span.start > ROUNDED_S
        for edge in ((span.start, 1), (span.end - ROUNDED_S, -1))
    )
    loading = most = 0
    for _, change in edges:
        loading += change
        most = max(most, loading)
    return most
