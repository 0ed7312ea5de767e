"""Settles what was typed into a job that can run: composed, fitted to the machine, admitted; and split by a planner
where it is simulated and nobody chose a split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from harness.checks.defaults import fit_to_gpus
from harness.checks.job import JobPlan, plan_job
from harness.config import ConfigError, JobConfig, RooflineConfig
from harness.config.compose import (
    compose_job,
    given_by,
    make_schedule,
    plain,
    read_job,
    refuse_unread,
    run_file,
    unread_of,
    without_effect,
)
from harness.config.job import flatten
from harness.config.machine import Machine
from harness.cost_model.job_cost import check_given
from harness.cost_model.memory import STATE_BYTES
from harness.cost_model.shape import parameters
from schedules import Schedule

_CHOSEN = (
    "schedule.split",
    "engine.tensor_parallel",
    "training.tensor_parallel",
    "training.pipeline_parallel",
    "training.expert_parallel",
    "algorithm.micro_batch_groups",
)
"""Settings that a planner searches: where the user gave one of them, nothing is planned."""


@dataclass(frozen=True)
class Draft:
    """A job on its way. arguments: as typed. schedule: of `config`, made once. messages: on what was chosen."""

    arguments: tuple[str, ...]
    config: JobConfig
    schedule: Schedule
    messages: tuple[str, ...] = ()

    @property
    def given(self) -> frozenset[str]:
        """Settings that the user gave a value."""
        return given_by(self.arguments)


Planner = Callable[[Draft, str], Draft]
"""Splits a job, with backend=virtual, by a split and a layout that it chooses; told what made it a simulation, "" where
the user asked for one. Raises ConfigError where nothing fits."""


@dataclass(frozen=True)
class SettledJob:
    """A job that can run. asked: by the arguments alone. config, plan: what runs, and on what; it is named by the
    backend that it runs on. planned: whether a plan was made for it. messages: for the user, on what was chosen."""

    asked: JobConfig
    config: JobConfig
    plan: JobPlan
    planned: bool
    messages: tuple[str, ...]

    @property
    def on_this_machine(self) -> JobConfig:
        """The job, with the kind of devices that it has."""
        return replace(self.config, cluster=replace(self.config.cluster, kind="gpu" if self.plan.gpu else "cpu"))


def settle(arguments: Sequence[str], machine: Machine, planner: Planner) -> SettledJob:
    """Return the job that runs where `arguments` are given. Raises ConfigError where it cannot run on this machine, and
    for a setting among them that it does not read."""
    refuse_unread(arguments, compose_job(arguments))
    job = settle_cell(arguments, machine, planner)
    unread = unread_of(arguments, job.on_this_machine)
    for name, (value, where) in unread.items():
        if name.partition(".")[0] in ("cost", "device"):  # of what is simulated, wherever the others may act
            raise ConfigError(without_effect(name, value, where))
    said = [f"No effect here: {name}={value}, read only where {where.words}" for name, (value, where) in unread.items()]
    return replace(job, messages=(*_unlike_its_file(arguments, job.config), *job.messages, *said))


def _unlike_its_file(arguments: Sequence[str], config: JobConfig) -> list[str]:
    """A line on how the job differs from that of the file which `arguments` name, where they name one."""
    if (path := run_file(arguments)) is None:
        return []
    there, here = (flatten(plain(replace(job, force=False))) for job in (read_job(path), config))
    changes = [
        f"{name} {there.get(name, 'none')} -> {here.get(name, 'none')}"
        for name in dict.fromkeys((*there, *here))
        if there.get(name) != here.get(name)
    ]
    return [f"unlike {path}: {', '.join(changes)}" if changes else f"as {path} says"]


def settle_cell(arguments: Sequence[str], machine: Machine, planner: Planner) -> SettledJob:
    """Return the same of a cell of several, which may leave unread what others read."""
    asked = compose_job(arguments)
    draft = Draft(tuple(arguments), asked, make_schedule(asked))
    fitted = fit_to_gpus(asked, draft.schedule, draft.given, machine)
    draft = replace(draft, config=fitted.config, messages=fitted.messages)
    draft, plan = admit_or_simulate(draft, machine, planner)
    config = replace(draft.config, backend=plan.backend)
    if plan.backend != "real":
        check_given(config)
    return SettledJob(asked, config, plan, draft.config != fitted.config, draft.messages)


def admit_or_simulate(draft: Draft, machine: Machine, planner: Planner) -> tuple[Draft, JobPlan]:
    """Return the job and where it runs: here as it is, or in a simulation, for which `planner` splits it unless the
    user did. Raises ConfigError where it can do neither."""
    if not _may_be_planned(draft):
        return draft, plan_job(draft.config, draft.schedule, machine)
    why = ""
    if draft.config.backend == "auto":
        try:
            plan = plan_job(draft.config, draft.schedule, machine)
        except ConfigError:
            # Its own split may be what is impossible. What no split of this machine holds is simulated all the same.
            why = _too_large(draft.config, machine)
            if not why:
                raise
        else:
            if plan.backend == "real":
                return draft, plan
            why = plan.why
    draft = planner(draft, why)
    return draft, plan_job(draft.config, draft.schedule, machine)


def _may_be_planned(draft: Draft) -> bool:
    """Whether a simulation of this job, at the costs of a roofline, has no split or layout of the user's."""
    chosen = any(name.startswith(_CHOSEN) for name in draft.given)
    return not chosen and isinstance(draft.config.cost, RooflineConfig) and draft.config.backend in ("auto", "virtual")


def _too_large(config: JobConfig, machine: Machine) -> str:
    """The beginning of a refusal where no split over this machine holds the job; empty where one may."""
    need = STATE_BYTES * parameters(config.model)
    if need <= max(machine.gpus * machine.gpu_bytes, psutil.virtual_memory().total):
        return ""
    return f"model={config.model.name} needs {need / 2**30:.0f} GiB for its training state, which is not there"
