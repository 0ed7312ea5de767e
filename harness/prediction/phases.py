"""Phases of a training pool, seconds for a batch: as given, or carried over from another number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.calibration.fitting import not_negative
from harness.config import ConfigError
from harness.prediction.table import Row, TableSettings, nearest

UPDATE, OLD = "update_actor_s", "old_log_prob_s"

Given = Literal["sync", "train"]
"""Rows that a prediction reads: synchronous ones only, or the training phases of the others too."""


def check_given(text: str) -> Given:
    """Raises ConfigError for what is neither."""
    if text == "train":
        return "train"
    if text == "sync":
        return "sync"
    raise ConfigError(f"GIVEN={text} is unknown; use train, or sync for predictions from synchronous rows only")


@dataclass(frozen=True)
class PhaseScaling:
    """A phase lasts fixed_s + device_s / n on n devices."""

    fixed_s: float
    device_s: float

    def on(self, devices: int) -> float:
        """Seconds on this many devices."""
        return self.fixed_s + self.device_s / devices


def scalings(rows: Sequence[Row], scoring_fixed_s: float) -> dict[str, PhaseScaling]:
    """Scalings of every phase that these rows give, over their training devices: least squares, neither part below 0.

    Rows that all have the same number of devices do not tell the parts apart: then `scoring_fixed_s`, half of the phase
    at most, is the fixed part of a scoring phase, and update_actor has none.
    """
    names = dict.fromkeys(name for row in rows for name in row.phases)
    fixed_s = {name: 0.0 if name == UPDATE else scoring_fixed_s for name in names}
    return {
        name: _scaling([(row.train_gpus, row.phases[name]) for row in rows if name in row.phases], fixed_s[name])
        for name in names
    }


def training_phases(
    row: Row,
    others: Sequence[Row],
    sync: Mapping[str, PhaseScaling],
    settings: TableSettings,
    given: Given,
    *,
    scores: bool,
    shared: bool,
) -> dict[str, float]:
    """Seconds of each phase of an asynchronous row.

    given="train": its own where it gives them; update_actor where it does not, from the row of the same schedule and
    engine that has it and is nearest in devices, less what more devices do not shorten: with k optimizer steps of f
    seconds each, U' = k f + (U - k f) n / n'. What remains, and with given="sync" everything, comes from the
    synchronous rows: update_actor takes `settings.dedicated` of the device time that it takes on shared devices, where
    those rows' devices are `shared`.

    An empty cell never means that nothing is done: what synchronous rows score is scored in every row, but old
    log-probs where the job is not to (`scores`). Raises ConfigError where no row says how long training takes.
    """
    if UPDATE not in sync:
        raise ConfigError(
            f"no synchronous row says how long training takes, and it is never for nothing: fill in {UPDATE} before "
            f"line {row.number}, {row}, is predicted"
        )
    alike = [other for other in others if other.mode == row.mode and other.engine == row.engine]
    phases = {}
    for name, scaling in sync.items():
        having = [other for other in alike if name in other.phases]
        if given == "train" and name in row.phases:
            phases[name] = row.phases[name]
        elif given == "train" and name == UPDATE and having:
            phases[name] = _from_nearest(row, having, settings)
        elif name == UPDATE:
            phases[name] = scaling.on(row.train_gpus) * (settings.dedicated if shared else 1.0)
        elif scores or name != OLD:
            phases[name] = scaling.on(row.train_gpus)
    return phases


def _from_nearest(row: Row, having: Sequence[Row], settings: TableSettings) -> float:
    near = nearest(having, row.train_gpus, lambda other: other.train_gpus)
    fixed = min(settings.optimizer_steps * settings.optimizer_step_s, near.phases[UPDATE])
    return fixed + (near.phases[UPDATE] - fixed) * near.train_gpus / row.train_gpus


def _scaling(points: Sequence[tuple[int, float]], fixed_s: float) -> PhaseScaling:
    devices, seconds = (np.array(part, float) for part in zip(*points, strict=True))
    if len(set(devices.tolist())) == 1:
        mean = float(seconds.mean())
        fixed_s = min(fixed_s, mean / 2)
        return PhaseScaling(fixed_s, float(devices[0]) * (mean - fixed_s))
    fixed, shared = not_negative(seconds, np.stack([np.ones_like(devices), 1 / devices], axis=1)).tolist()
    return PhaseScaling(fixed, shared)
