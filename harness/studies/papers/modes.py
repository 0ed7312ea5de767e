"""The ways of working that an experiment compares: how long a step of each takes, and how busy its devices are; also in
systems drawn, by the draws of plans (`harness.planner.judgement`)."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from harness.checks.layout import device_roles
from harness.config import STRICT, ConfigError, CostConfig, JobConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.fields import Count
from harness.config.placement import resolve_split
from harness.cost_model.job_cost import simulated_cost
from harness.cost_model.memory import JobLayout
from harness.cost_model.roofline import roofline
from harness.driver.event_model import fast_steps
from harness.driver.recorder import Recorder
from harness.driver.session import simulate
from harness.planner.judgement import InTurn, costs_in, in_system, systems
from harness.prediction.posterior import factors_of
from harness.prediction.simulation import END, WARMUP, one_device_each
from harness.rpc.children import parallel_map
from harness.studies.papers.result import Role

SCORING = ("actor_fwd", "reference")

_LEAST_BATCHES = 6
_LEAST_SAMPLES = 4096

TIMEOUT_S = 3600.0  # longest wait for simulations side by side


@dataclass(frozen=True, config=STRICT)
class Mode:
    """A schedule with its options, as `make bench` takes them. label: what the published table has; devices: by role,
    of pools that count as one device of the simulation each (see `pooled`); none: the job's own placement."""

    label: Annotated[str, Field(min_length=1)]
    job: list[str]
    role: Role
    devices: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True, config={"arbitrary_types_allowed": True})
class SimulatedSteps:
    """Simulated steps. window: those that count, first and last second."""

    seconds: float
    window: tuple[float, float]
    recorder: Recorder

    def busy(self, devices: Mapping[str, int]) -> float:
        """Share of the time in which a device works, for whatever role: a mean over devices. An engine works as long as
        it has any sample, were it the last of a batch. devices: of each pool, by role, where pools are one device of
        the simulation each; none where all roles share all devices."""
        timeline = self.recorder.timeline
        if not devices:
            return 1.0 - timeline.idle("actor", self.window)
        busy = {role: 1.0 - timeline.idle(role, self.window) for role in devices}
        return sum(devices[role] * busy[role] for role in devices) / sum(devices.values())

    def busiest(self) -> float:
        """The same of the busiest pool: how near the step is to what no schedule could undercut on these pools."""
        return self.recorder.timeline.fraction_of_bound(self.window)


def of_role(modes: Sequence[Mode], role: Role) -> Mode:
    """The first mode of this role."""
    return next(mode for mode in modes if mode.role == role)


def composed(mode: Mode, job: Sequence[str]) -> JobConfig:
    """The mode's job, after these settings, on devices of its own placement."""
    return compose_job(["backend=virtual", *job, *mode.job])


def job_of(mode: Mode, job: Sequence[str]) -> JobConfig:
    """The mode's job, after these settings."""
    config = composed(mode, job)
    return pooled(config, mode.devices) if mode.devices else config


def batches_of(config: JobConfig) -> int:
    """Simulated batches that a step is a mean over: as many as have enough samples for a steady tail."""
    return max(_LEAST_BATCHES, math.ceil(_LEAST_SAMPLES / config.algorithm.batch_samples))


def _whole(config: JobConfig) -> JobConfig:
    """The job for as long as its batches take, between filling and emptying."""
    iterations = WARMUP + batches_of(config) + math.ceil(make_schedule(config).eta) + END
    return replace(config, iterations=iterations, warmup_iterations=WARMUP)


def steps(config: JobConfig) -> SimulatedSteps:
    """Run a job on the virtual clock: seconds of a step in the long run."""
    batches = batches_of(config)
    recorder = simulate(_whole(config), seed=0)
    ends = recorder.timeline.iteration_ends
    window = (ends[WARMUP - 1], ends[WARMUP + batches - 1])
    return SimulatedSteps((window[1] - window[0]) / batches, window, recorder)


class StepFigures(NamedTuple):
    """Seconds of a step in the long run, and of generating in it; shares of the time in which roles idle."""

    seconds: float
    generation_s: float
    rollout_idle: float
    actor_idle: float


def step_figures(config: JobConfig) -> StepFigures:
    """The same steps by the event model, in a fraction of the time."""
    end = WARMUP + batches_of(config)
    found, measured = fast_steps(_whole(config), 0, end), slice(WARMUP, end)
    seconds, generation_s, rollout_s, actor_s = (
        float(values[measured].mean())
        for values in (found.seconds, found.generate_s, found.busy_s["rollout"], found.busy_s["actor"])
    )
    return StepFigures(seconds, generation_s, 1 - rollout_s / seconds, 1 - actor_s / seconds)


def drawn_figures(
    modes: Sequence[Mode], job: Sequence[str], given: Collection[str], processes: int
) -> NDArray[np.float64]:
    """Figures of every mode in each system drawn: float64 [figures, modes, draws]. given: settings that are not drawn.
    The first mode works in turn: what surrounds its step surrounds the others."""
    ways = [(composed(mode, job), mode.devices) for mode in modes]
    found = parallel_map(
        partial(_in_system, ways, given),
        systems(ways[0][0]),
        processes=processes,
        timeout_s=TIMEOUT_S,
        what="systems drawn",
    )
    return np.array(found).transpose(2, 1, 0)


def _in_system(
    ways: Sequence[tuple[JobConfig, Mapping[str, int]]], given: Collection[str], q: Mapping[str, float]
) -> list[StepFigures]:
    bare = [_priced(in_system(config, q, given), devices) for config, devices in ways]
    beside = bare[0][1]["actor"]
    jobs = []
    for job, devices in bare:
        scorers = next((devices[role] for role in SCORING if role in devices), devices["actor"])
        shared = make_schedule(job).colocated
        assert isinstance(job.cost, CostConfig)
        jobs.append((job, costs_in(job.cost, q, devices["actor"], scorers, shared, beside)))
    job, cost = jobs[0]
    alone = step_figures(replace(job, cost=InTurn.of(q, 0.0, 0.0, beside).around(job, cost, q)))
    around = InTurn.of(q, alone.seconds, alone.generation_s, beside)
    whole = jobs[0][0].algorithm.batch_samples
    return [
        step_figures(replace(job, cost=around.of_part(job.algorithm.batch_samples / whole).around(job, cost, q)))
        for job, cost in jobs
    ]


def _priced(config: JobConfig, devices: Mapping[str, int]) -> tuple[JobConfig, Mapping[str, int]]:
    """A job at its roofline's costs, and the devices of each role."""
    if devices:
        return pooled(config, devices), devices
    placement = resolve_split(config.schedule.split, config.cluster.devices, device_roles(config))
    job = replace(config, cost=simulated_cost(config, placement))
    return job, {role: len(its) for role, its in placement.devices.items()}


def pooled(config: JobConfig, devices: Mapping[str, int]) -> JobConfig:
    """The job on these devices by role: engines stay one by one, every other pool becomes one device of the simulation,
    as fast as its data-parallel ranks together.

    So a trainer of several ranks takes whatever is ready, as systems do that deal micro-batches out from one queue;
    here a world of several ranks reads in order of admission. Roles that score must have equally many devices, since
    they share one setting. Raises ConfigError where they do not, or devices make no whole workers."""
    engines = _workers(devices, "rollout", config.engine.tensor_parallel)
    rank = config.training.ranks_together
    ranks = _workers(devices, "actor", rank)
    scoring = {role: devices[role] for role in SCORING if role in devices}
    if len(set(scoring.values())) > 1:
        raise ConfigError(f"devices: {scoring} score with different numbers; give them equally many")
    scorers = _workers(devices, next(iter(scoring)), rank) if scoring else 1
    split: dict[str, int | str] = {"rollout": engines, "actor": 1}
    split |= {role: 1 if role in scoring else "actor" for role in SCORING}
    return replace(one_device_each(config, split), cost=_cost(config, devices, ranks, scorers))


def _cost(config: JobConfig, devices: Mapping[str, int], ranks: int, scorers: int) -> CostConfig:
    training, algorithm = config.training, config.algorithm
    layout = JobLayout(
        engine_devices=config.engine.tensor_parallel,
        train_devices=training.ranks_together,
        train_ranks=ranks,
        pipeline=training.pipeline_parallel,
        samples_per_call=algorithm.micro_batch_groups * algorithm.group_size,
        recompute=training.recompute_activations,
        one_node=sum(devices.values()) <= config.device.per_node,
    )
    cost = roofline(config.model, config.device, factors_of(config), layout)
    return replace(
        cost,
        train_s_per_token=cost.train_s_per_token / ranks,
        train_s_per_pair=cost.train_s_per_pair / ranks,
        log_prob_s_per_token=cost.log_prob_s_per_token / scorers,
        log_prob_s_per_pair=cost.log_prob_s_per_pair / scorers,
    )


def _workers(devices: Mapping[str, int], role: str, each: int) -> int:
    if role not in devices or devices[role] % each:
        raise ConfigError(f"devices: {role}={devices.get(role, 0)} makes no whole workers of {each} devices")
    return devices[role] // each
