"""Runs the schedule's own file on the virtual clock, for a few iterations, and reads what a plan is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from harness.config import JobConfig
from harness.driver.recorder import Recorder
from harness.driver.session import simulate
from schedules import KStepOff, Schedule

_LEAST_SAMPLES = 1024  # measured over as many iterations as have so many
_LEAST_ITERATIONS = 2


@dataclass(frozen=True)
class Window:
    """Iterations of a trial: the first are left out, for the pipeline to fill; the last, because it empties."""

    warmup: int
    measured: int
    iterations: int


@dataclass(frozen=True)
class Outcome:
    """What a candidate does, in the long run. Lags in iterations, idle as shares of the time, exposed_s the seconds of
    an iteration in which a device waits for weights, longest_s of the response that took longest.

    bound: seconds that no run takes less than; fraction_of_bound: the busiest pool's work over the time.
    """

    seconds: float
    bound: float
    samples_per_s: float
    tokens_per_s_per_device: float
    lag_mean: float
    lag_worst: float
    rollout_idle: float
    training_idle: float
    exposed_s: float
    longest_s: float
    fraction_of_bound: float


def window(schedule: Schedule, batch_samples: int) -> Window:
    """What to simulate of a schedule that may be `eta` iterations ahead: fill, measure whole cycles, empty."""
    ahead, cycle = math.ceil(schedule.eta), schedule.k if isinstance(schedule, KStepOff) else 1
    least = max(_LEAST_ITERATIONS, math.ceil(_LEAST_SAMPLES / batch_samples))
    warmup, measured = (cycle * math.ceil(n / cycle) for n in (1 + ahead, least))
    return Window(warmup, measured, warmup + measured + ahead)


def trial(config: JobConfig, its: Window, seed: int, *, bound: float) -> Outcome:
    """Simulate `config`. Where what was made before the window lets it pass in less than `bound`, the bound is taken:
    in the long run nothing is made before."""
    told: list[Mapping[str, float]] = []
    config = replace(config, iterations=its.iterations, warmup_iterations=its.warmup)
    recorder = simulate(config, seed, started=lambda session: session.recorder.listeners.append(told.append))
    timeline, end = recorder.timeline, its.warmup + its.measured
    span = (timeline.iteration_ends[its.warmup - 1], timeline.iteration_ends[end - 1])
    seconds = max(bound, (span[1] - span[0]) / its.measured)
    measured = told[its.warmup : end]
    tokens = _mean(measured, "throughput/tokens_per_s", weight="time/iteration_s") * (span[1] - span[0]) / its.measured
    return Outcome(
        seconds=seconds,
        bound=bound,
        samples_per_s=config.algorithm.batch_samples / seconds,
        tokens_per_s_per_device=tokens / seconds / config.cluster.devices,
        lag_mean=_mean(measured, "staleness/mean"),
        lag_worst=max(metrics["staleness/max"] for metrics in measured),
        rollout_idle=timeline.idle("rollout", span),
        training_idle=timeline.idle("actor", span),
        exposed_s=_mean(measured, "time/weight_sync_exposed_s"),
        longest_s=_longest_s(recorder, range(its.warmup, end)),
        fraction_of_bound=timeline.fraction_of_bound(span),
    )


def _longest_s(recorder: Recorder, iterations: range) -> float:
    """From a response's first slot to its last token."""
    trained = [its for its in recorder.samples() if its.trained_iteration in iterations]
    return max(its.finished_at - its.started_at for its in trained if its.finished_at and its.started_at is not None)


def _mean(measured: list[Mapping[str, float]], name: str, weight: str | None = None) -> float:
    """Over iterations, each counted as often as `weight` says."""
    weights = None if weight is None else [metrics[weight] for metrics in measured]
    return float(np.average([metrics[name] for metrics in measured], weights=weights))
