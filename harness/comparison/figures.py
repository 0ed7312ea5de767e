"""The figures of a run that a comparison shows: what each is, which way is better, and how a run gives it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.comparison.parts import Better
from harness.comparison.runs import Run
from harness.comparison.statistics.series import reach, running_mean, steady_rate
from harness.config.placement import HOST_ROLES

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Of exact match. Shown are those that some run reaches and not every run has reached from the start."""

SPEED = "throughput/samples_per_s"
EXACT_MATCH = "reward/exact_match"
_END = 10  # the end of a run is its last tenth
_SMOOTH = 20  # running means span a twentieth of a run


_SHARE = (0.0, 1.0)
_POSITIVE = (0.0, math.inf)
_ANY = (-math.inf, math.inf)


@dataclass(frozen=True)
class Figure:
    """`of` gives the value of a run; infinite where the run never got there. range: what it can be at all."""

    key: str
    title: str
    unit: str
    better: Better | None
    compared: Literal["difference", "ratio"]
    of: Callable[[Run], float]
    range: tuple[float, float] = _POSITIVE


def figures_of(runs: Sequence[Run]) -> list[Figure]:
    """Those that every one of these runs can give: a simulated run has no rewards."""
    figures = [
        Figure(SPEED, "samples per second", "1/s", "higher", "ratio", _samples_per_s),
        Figure("throughput/tokens_per_s", "tokens per second", "tokens/s", "higher", "ratio", _tokens_per_s),
        Figure("seconds", "whole run, warm-up included", "s", "lower", "ratio", lambda run: float(seconds(run)[-1])),
        Figure(
            "throughput/fraction_of_bound", "fraction of bound", "", "higher", "difference", _fraction_of_bound, _SHARE
        ),
    ]
    if rewarded(runs):
        figures += [
            Figure(EXACT_MATCH, "exact match at the end", "", "higher", "difference", at_end(EXACT_MATCH), _SHARE),
            Figure("reward/mean", "mean reward at the end", "", "higher", "difference", at_end("reward/mean"), _ANY),
            Figure(
                f"{EXACT_MATCH}/run",
                "exact match over the whole run",
                "",
                "higher",
                "difference",
                _mean(EXACT_MATCH),
                _SHARE,
            ),
            *_reaching(runs),
        ]
    figures += [
        Figure("staleness/mean", "mean lag of a sample", "iterations", None, "difference", _lag_mean),
        Figure("staleness/max", "largest lag of a token", "iterations", None, "difference", _lag_worst),
        Figure("response_length/mean", "response length", "tokens", None, "difference", _mean("response_length/mean")),
    ]
    sync = "time/weight_sync_exposed_s"
    figures.append(Figure(sync, "weight sync exposed, per iteration", "s", "lower", "difference", _mean(sync)))
    if any(run.ledger["dropped_stale"] for run in runs):
        figures.append(Figure("ledger/dropped_stale", "dropped as stale", "", "lower", "difference", _dropped, _SHARE))
    return figures + [_idle(role) for role in _device_roles(runs)]


def rewarded(runs: Sequence[Run]) -> bool:
    return all(EXACT_MATCH in iteration for run in runs for iteration in run.metrics)


def column(run: Run, key: str) -> np.ndarray:
    """float64 [iterations]: a metric of every iteration."""
    return np.array([iteration[key] for iteration in run.metrics], dtype=np.float64)


def seconds(run: Run) -> np.ndarray:
    """float64 [iterations]: the run's clock at the end of each."""
    return column(run, "seconds")


def tokens(run: Run) -> np.ndarray:
    """float64 [iterations]: prompt and response tokens that each trained."""
    return column(run, "throughput/tokens_per_s") * column(run, "time/iteration_s")


def warmup(run: Run) -> int:
    """Iterations left out of rates, as the run was told."""
    return int(run.config["warmup_iterations"])


def smoothing(run: Run) -> int:
    """Iterations that running means span: a twentieth of the run."""
    return max(1, len(run.metrics) // _SMOOTH)


def at_end(key: str) -> Callable[[Run], float]:
    """The mean of a metric over the last tenth of the iterations (at least one), each weighing the same."""
    return lambda run: float(np.mean(column(run, key)[-math.ceil(len(run.metrics) / _END) :]))


def _mean(key: str) -> Callable[[Run], float]:
    return lambda run: float(np.mean(column(run, key)))


def _samples_per_s(run: Run) -> float:
    return steady_rate(seconds(run), np.diff(column(run, "samples"), prepend=0.0), warmup(run))


def _tokens_per_s(run: Run) -> float:
    return steady_rate(seconds(run), tokens(run), warmup(run))


def _fraction_of_bound(run: Run) -> float:
    return run.timeline.fraction_of_bound()


def _lag_mean(run: Run) -> float:
    return float(np.mean(trained(run, "lag_mean")))


def _lag_worst(run: Run) -> float:
    return float(np.max(trained(run, "lag_worst")))


def _dropped(run: Run) -> float:
    return run.ledger["dropped_stale"] / run.ledger["admitted"]


def trained(run: Run, name: str) -> np.ndarray:
    """A column of samples.parquet, of the samples that were trained."""
    fates = run.samples.column("fate").to_numpy(zero_copy_only=False)
    return run.samples.column(name).to_numpy(zero_copy_only=False)[fates == "trained"]


def _device_roles(runs: Sequence[Run]) -> list[str]:
    """Roles that every run has on devices."""
    shared = set.intersection(*(set(run.timeline.roles) for run in runs)) - set(HOST_ROLES)
    return [role for role in runs[0].timeline.roles if role in shared]


def _idle(role: str) -> Figure:
    def idle(run: Run) -> float:
        return run.timeline.idle(role)

    return Figure(f"idle/{role}", f"idle, devices of {role}", "", "lower", "difference", idle, _SHARE)


def _reaching(runs: Sequence[Run]) -> list[Figure]:
    figures = []
    for threshold in THRESHOLDS:
        there = [_reach("samples", threshold)(run) for run in runs]
        at_once = [running_mean(column(run, EXACT_MATCH), smoothing(run))[smoothing(run) - 1] for run in runs]
        if min(there) < math.inf and min(at_once) < threshold:
            for axis, unit in (("samples", "samples"), ("seconds", "s")):
                title = f"{axis} to exact match {threshold:g}"
                key = f"reach/{axis}/{threshold:g}"
                figures.append(Figure(key, title, unit, "lower", "ratio", _reach(axis, threshold)))
    return figures


def _reach(axis: str, threshold: float) -> Callable[[Run], float]:
    return lambda run: reach(column(run, axis), column(run, EXACT_MATCH), threshold, smoothing(run))
