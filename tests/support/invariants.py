"""What must hold of a finished run (harness/comparison/promises.py), and of its turns and devices."""

from pathlib import Path

import numpy as np

from harness.comparison import promises
from harness.comparison.promises import FinishedRun
from harness.metrics.run_files import load_kept, load_metrics, load_samples
from harness.metrics.timeline import WORK_KINDS, Timeline
from harness.protocols import Span

ROUNDED_S = 2e-6
MISMATCH_KL = 1e-8
"""Of float32 on both sides: log-probs within 1e-4, whose square k3 has."""


def check_run(run: FinishedRun) -> None:
    """Everything that holds for all schedules, and what holds for this one."""
    assert promises.broken_promises(run) == []


def check_every_sample_once(run: FinishedRun) -> None:
    assert list(promises.sample_problems(run)) == []


def check_dispatch(run: FinishedRun) -> None:
    assert list(promises.dispatch_problems(run)) == []


def check_times(run: FinishedRun) -> None:
    assert list(promises.time_problems(run)) == []


def check_lags(run: FinishedRun, *, newer: bool = False) -> None:
    assert list(promises.lag_problems(run, newer=newer)) == []


def check_turns(folder: Path) -> None:
    """Some samples had several turns; what their environments wrote is masked, and has no log-prob; and the trainer
    finds for the rest the log-probs that the engine had, where both had the same weights."""
    samples, responses = load_samples(folder).to_pydict(), load_kept(folder, "responses").to_pydict()
    assert max(samples["turns"]) > 1
    written = dict(zip(samples["sample_id"], samples["environment_tokens"], strict=True))
    for sample, turns in zip(samples["sample_id"], samples["turns"], strict=True):
        assert (written[sample] > 0) == (turns > 1)
    for sample, *rows in zip(*(responses[name] for name in ("sample_id", "loss_mask", "log_probs")), strict=True):
        mask, log_probs = map(np.array, rows)
        assert (~mask).sum() == written[sample] and (mask == (log_probs < 0)).all()
    mismatches = [row["policy/mismatch_kl"] for row in load_metrics(folder) if "policy/mismatch_kl" in row]
    assert mismatches and max(map(abs, mismatches)) < MISMATCH_KL


def spans_by_device(run: FinishedRun) -> dict[str, list[Span]]:
    """Work, by its start."""
    by_device: dict[str, list[Span]] = {}
    for span in run.timeline.spans:
        if span.kind in WORK_KINDS and span.end > span.start:
            for device in run.timeline.placement[span.role, span.engine].devices:
                by_device.setdefault(device, []).append(span)
    return by_device


def check_devices(run: FinishedRun) -> None:
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
