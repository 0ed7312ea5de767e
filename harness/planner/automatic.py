"""Settles what was typed into a job that can run: what nobody said is chosen for the machine, and a simulated job
without a split of the user's own gets a plan first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from harness.checks.defaults import fitted
from harness.checks.job import JobPlan, plan_job
from harness.checks.layout import device_roles
from harness.config import ConfigError, JobConfig, RooflineConfig
from harness.config.compose import compose_job, make_schedule, names_of
from harness.config.machine import Machine
from harness.cost_model.job_cost import check_given
from harness.cost_model.memory import STATE_BYTES
from harness.cost_model.shape import parameters

DEVICES = 16
"""Of a simulated job that does not say: two nodes of eight, the fewest on which models of 32 billion parameters train
beside their rollout on devices of 80 GB."""

SAMPLES, TRIALS = 25_000, 6
"""The effort of a plan that nobody asked for by itself."""

_CHOSEN = (
    "schedule.split",
    "engine.tensor_parallel",
    "training.tensor_parallel",
    "training.pipeline_parallel",
    "training.expert_parallel",
)
_SEARCHED = "algorithm.micro_batch_groups"
_MAX_STALENESS = "schedule.max_staleness"  # decides what is learnt: a plan of one schedule leaves it


@dataclass(frozen=True)
class SettledJob:
    """asked: by the arguments alone. config, plan: what runs, and on what; it is named by the backend that it runs on.
    planned: whether a plan was made for it. messages: for the user, on what was chosen."""

    asked: JobConfig
    config: JobConfig
    plan: JobPlan
    planned: bool
    messages: tuple[str, ...]


def settled(arguments: Sequence[str], machine: Machine) -> SettledJob:
    """The job that runs where `arguments` are given. Raises ConfigError where it cannot run on this machine."""
    asked = compose_job(arguments)
    job = fitted(asked, make_schedule(asked), names_of(arguments), machine)
    planned = with_plan(job.config, arguments, machine)
    plan = plan_job(planned.config, make_schedule(planned.config), machine)
    config = replace(planned.config, backend=plan.backend)
    if plan.backend != "real":
        check_given(config)
    return SettledJob(asked, config, plan, planned.config != job.config, planned.messages or job.messages)


@dataclass(frozen=True)
class PlannedJob:
    """config: what to run. messages: for the user, on what was chosen; empty where nothing was."""

    config: JobConfig
    messages: tuple[str, ...] = ()


def with_plan(config: JobConfig, arguments: Sequence[str], machine: Machine) -> PlannedJob:
    """The job that `arguments` were composed to, with a split and a layout of the planner's where it will be simulated
    at the costs of a roofline and the user chose neither.

    Raises ConfigError where nothing fits. A job that runs for real is left as it is.
    """
    given = names_of(arguments)
    chosen = any(name.startswith(_CHOSEN) or name == _SEARCHED for name in given)
    if chosen or not isinstance(config.cost, RooflineConfig) or config.backend not in ("auto", "virtual"):
        return PlannedJob(config)
    why = _why_simulated(config, machine)
    if why is None:
        return PlannedJob(config)
    if not given & {"cluster", "cluster.devices"}:
        config = replace(config, cluster=replace(config.cluster, devices=DEVICES))
    config = replace(config, backend="virtual")
    from harness.planner.explore import Effort  # loads torch: a run that needs no plan does so later
    from harness.planner.plan import bench_command, devices_and_batch, make_plan

    effort = Effort(samples=SAMPLES, trials=TRIALS)
    plan = make_plan([config], frozenset(given) | {_MAX_STALENESS}, effort, processes=1)
    command = bench_command(plan.best, arguments, config.iterations)
    split, layout = plan.best.candidate.describe()
    devices, batch = devices_and_batch(config)
    messages = (
        *((f"Why: {why}",) if why else ()),
        f"Planned for {devices}, with {batch} an iteration: {split}; {layout}. The same as",
        f"  {command}",
    )
    return PlannedJob(plan.best.candidate.apply(config, device_roles(config)), messages)


def _why_simulated(config: JobConfig, machine: Machine) -> str | None:
    """Why this job will be simulated, empty where the user asked for it; None where it will not, or cannot, be."""
    if config.backend == "virtual":
        return ""
    try:
        plan = plan_job(config, make_schedule(config), machine)
    except ConfigError:
        # Its own split may be what is impossible. What no split of this machine holds is simulated all the same.
        need = STATE_BYTES * parameters(config.model)
        if need <= max(machine.gpus * machine.gpu_bytes, psutil.virtual_memory().total):
            raise
        return f"model={config.model.name} needs {need / 2**30:.0f} GiB for its training state, which is not there"
    return plan.why if plan.backend == "virtual" else None
