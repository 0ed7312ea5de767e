"""The ways of working that an experiment compares, and how long a step of each takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from harness.config import STRICT, JobConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.fields import Count
from harness.driver.recorder import Recorder
from harness.driver.session import simulate
from harness.studies.papers.pools import pooled
from harness.studies.papers.result import Role
from harness.studies.predictions.fit import WARMUP
from harness.studies.predictions.prediction import END

_LEAST_BATCHES = 6
_LEAST_SAMPLES = 4096


@dataclass(frozen=True, config=STRICT)
class Mode:
    """A schedule with its options, as `make bench` takes them. label: what the published table has; devices: by role,
    of pools that count as one device of the simulation each (see `pooled`); none: the job's own placement."""

    label: Annotated[str, Field(min_length=1)]
    job: list[str]
    role: Role
    devices: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True, config={"arbitrary_types_allowed": True})
class Steps:
    """Simulated steps. window: those that count, first and last second."""

    seconds: float
    window: tuple[float, float]
    recorder: Recorder


def of_role(modes: Sequence[Mode], role: Role) -> Mode:
    """The first mode of this role."""
    return next(mode for mode in modes if mode.role == role)


def job_of(mode: Mode, job: Sequence[str]) -> JobConfig:
    """The mode's job, after these settings."""
    config = compose_job(["backend=virtual", *job, *mode.job])
    return pooled(config, mode.devices) if mode.devices else config


def batches_of(config: JobConfig) -> int:
    """Simulated batches that a step is a mean over: as many as have enough samples for a steady tail."""
    return max(_LEAST_BATCHES, math.ceil(_LEAST_SAMPLES / config.algorithm.batch_samples))


def steps(config: JobConfig) -> Steps:
    """Run a job on the virtual clock: seconds of a step in the long run, between filling and emptying."""
    batches = batches_of(config)
    end = math.ceil(make_schedule(config).eta) + END
    config = replace(config, iterations=WARMUP + batches + end, warmup_iterations=WARMUP)
    recorder = simulate(config, seed=0)
    ends = recorder.timeline.iteration_ends
    window = (ends[WARMUP - 1], ends[WARMUP + batches - 1])
    return Steps((window[1] - window[0]) / batches, window, recorder)
