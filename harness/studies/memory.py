"""The memory plan of a job as a table: for `make doctor`, and for docs/gpu.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from harness.config import JobConfig
from harness.config.checks.defaults import fitted
from harness.config.checks.job import changes_that_fit, device_roles, lengths_of, real_setting
from harness.config.compose import compose_job, make_schedule, names_of
from harness.config.machine import Machine, this_machine
from harness.config.model_folder import HUB
from harness.config.placement import Placement, resolve_split
from harness.cost_model.memory_plan import GIB, Item, Lengths, MemoryPlan, PoolMemory, plan_memory


@dataclass(frozen=True)
class PlannedMemory:
    """messages: what was chosen for the machine. fixes: what makes it fit, where it does not."""

    config: JobConfig
    machine: Machine
    placement: Placement
    lengths: Lengths
    plan: MemoryPlan
    messages: tuple[str, ...]
    fixes: tuple[str, ...]


def planned_memory(arguments: Sequence[str]) -> PlannedMemory:
    """Of a real job with these settings on GPUs of its `device`, or of this machine where no device is named.

    Raises ConfigError where the job cannot be made, or does not divide.
    """
    config = _without_hub(compose_job(arguments))
    given = names_of(arguments)
    machine = described_machine(config, given)
    schedule = make_schedule(config)
    job = fitted(config, schedule, given, machine)
    placement = resolve_split(job.config.schedule.split, job.config.cluster.devices, device_roles(job.config))
    lengths = lengths_of(job.config)
    setting = real_setting(job.config, schedule, machine, lengths, gpu=True)
    plan = plan_memory(job.config, placement, setting)
    fixes = () if plan.fits else tuple(changes_that_fit(job.config, schedule, machine, lengths))
    return PlannedMemory(job.config, machine, placement, lengths, plan, job.messages, fixes)


def _without_hub(config: JobConfig) -> JobConfig:
    """The same sizes without the weights and the tokenizer of a repository, which nothing here is read from."""
    checkpoint = config.model.checkpoint
    if checkpoint is None or not checkpoint.startswith(HUB):
        return config
    return replace(config, model=replace(config.model, checkpoint=None))


def described_machine(config: JobConfig, given: Collection[str]) -> Machine:
    """GPUs as `device` describes them, where it is named or there are none here: DEVICES, or a node of them."""
    here = this_machine()
    if here.gpus and "device" not in given:
        return here
    device = config.device
    gpus = config.cluster.devices if {"cluster", "cluster.devices"} & set(given) else device.per_node
    return Machine(here.cores, gpus, int(device.memory_bytes), nodes=-(-gpus // device.per_node))


def rows(pool: PoolMemory) -> list[tuple[str, list[float | None]]]:
    """A row for each thing that lies on a device of the pool, in GiB in each of its phases; None where it does not."""
    return [(item.what, [_gib(item, phase) for phase in pool.phases]) for item in pool.items if item.bytes]


def _gib(item: Item, phase: str) -> float | None:
    return item.bytes / GIB if phase in item.phases else None
