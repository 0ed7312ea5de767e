"""What must hold of a finished run under its schedule (docs/schedules.md), whatever clock it ran on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from harness.config import JobConfig, job_config
from harness.config.compose import make_schedule
from harness.metrics.run_files import load_ledger, load_metrics, load_samples, load_timeline
from harness.metrics.samples import DEALT_AGAIN, SampleRecord, read_responses, record_of
from harness.metrics.timeline import WORK_KINDS, Timeline
from harness.protocols import Span
from schedules.capacity import Capacity

ROUNDED_S = 2e-6
MISMATCH_KL = 1e-8
"""Of float32 on both sides: log-probs within 1e-4, whose square k3 has."""


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
    check_lags(run)
    check_drops(run)


def check_every_sample_once(run: Finished) -> None:
    """Trained once or dropped for a reason, groups whole, every batch full, nothing left in flight, a closed ledger."""
    places = {place_of(sample) for sample in run.samples}
    if not run.config.algorithm.filters:
        assert [sample.sample_id for sample in run.samples] == list(range(len(run.samples)))
    assert places == set(range(len(places)))
    check_refused(run)
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
    assert run.counts["in_flight"] == 0


def place_of(sample: SampleRecord) -> int:
    """The number of the group that was first dealt to where its group was."""
    return sample.group_id % DEALT_AGAIN


def check_refused(run: Finished) -> None:
    """Of the groups that a place was dealt, one after the other, all but the last were refused by a filter."""
    dealt: dict[int, list[tuple[int, str]]] = {}
    for sample in run.samples:
        dealt.setdefault(place_of(sample), []).append((sample.group_id // DEALT_AGAIN, sample.fate))
    for fates in dealt.values():
        last = max(deal for deal, _ in fates)
        assert {deal for deal, _ in fates} == set(range(last + 1))
        assert all((fate == "dropped_filtered") == (deal < last) for deal, fate in fates)
    if not run.config.algorithm.filters:
        assert run.counts["dropped_filtered"] == 0


def check_dispatch(run: Finished) -> None:
    """No engine started a group before its weights allowed it; drops move the limits on by what was dropped."""
    capacity = Capacity(run.batch, make_schedule(run.config).eta)
    dropped = run.counts["dropped_stale"] // run.group
    for sample in run.trained:
        assert sample.version_first is not None
        assert place_of(sample) < capacity.limit(sample.version_first) + dropped


def check_times(run: Finished) -> None:
    for sample in run.trained:
        assert sample.admitted_at <= sample.started_at <= sample.finished_at <= sample.trained_at  # type: ignore[operator]


def check_lags(run: Finished, *, newer: bool = False) -> None:
    """Every token's lag is within what the schedule says: the ends of each sample's range, which hold all between them.
    newer: a sample may have newer versions than its schedule has for it."""
    schedule = make_schedule(run.config)
    for sample in run.trained:
        iteration, first, last = sample.trained_iteration, sample.version_first, sample.version_last
        assert iteration is not None and first is not None and last is not None
        least, worst = schedule.lag_bounds(iteration)
        assert (0 if newer else least) <= iteration - last <= iteration - first <= worst, sample
    if schedule.order == "fifo":
        check_fifo(run)


def check_drops(run: Finished) -> None:
    """Whole groups, and only where a schedule may: in completion order."""
    assert run.counts["dropped_stale"] % run.group == 0
    schedule = make_schedule(run.config)
    if schedule.order == "fifo" or getattr(schedule, "on_stale", None) == "wait":
        assert run.counts["dropped_stale"] == 0


def check_fifo(run: Finished) -> None:
    """Group N is trained in iteration N // batch."""
    assert all(sample.trained_iteration == place_of(sample) // run.batch for sample in run.trained)


def check_turns(folder: Path) -> None:
    """Some samples had several turns; what their environments wrote is masked, and has no log-prob; and the trainer
    finds for the rest the log-probs that the engine had, where both had the same weights."""
    samples, responses = load_samples(folder).to_pydict(), read_responses(folder / "responses.parquet").to_pydict()
    assert max(samples["turns"]) > 1
    written = dict(zip(samples["sample_id"], samples["environment_tokens"], strict=True))
    for sample, turns in zip(samples["sample_id"], samples["turns"], strict=True):
        assert (written[sample] > 0) == (turns > 1)
    for sample, *rows in zip(*(responses[name] for name in ("sample_id", "loss_mask", "log_probs")), strict=True):
        mask, log_probs = map(np.array, rows)
        assert (~mask).sum() == written[sample] and (mask == (log_probs < 0)).all()
    mismatches = [row["policy/mismatch_kl"] for row in load_metrics(folder) if "policy/mismatch_kl" in row]
    assert mismatches and max(map(abs, mismatches)) < MISMATCH_KL


def spans_by_device(run: Finished) -> dict[str, list[Span]]:
    """Work, by its start."""
    by_device: dict[str, list[Span]] = {}
    for span in run.timeline.spans:
        if span.kind in WORK_KINDS and span.end > span.start:
            for device in run.timeline.placement[span.role, span.engine].devices:
                by_device.setdefault(device, []).append(span)
    return by_device


def check_devices(run: Finished) -> None:
    """A device works for one role at a time."""
    for spans in spans_by_device(run).values():
        latest: dict[str, Span] = {}  # of each role, the span that ended last; spans come by their start
        for span in spans:
            for role, before in latest.items():
                assert role == span.role or before.end <= span.start + ROUNDED_S, (before, span)
            if span.role not in latest or latest[span.role].end < span.end:
                latest[span.role] = span


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
