"""The memory plan of a job as a table: for `make doctor`, and for the page of harness/studies/gpu_memory.py."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from harness.checks.defaults import FittedJob, as_long_as_simulated, fit_to_gpus, leanest
from harness.checks.job import lengths_of, plan_elsewhere, plan_job, without_hub
from harness.checks.layout import device_roles
from harness.checks.machine import changes_that_fit, real_setting
from harness.config import ConfigError, JobConfig
from harness.config.compose import changed, compose_job, given_by, make_schedule
from harness.config.machine import Machine, described, this_machine
from harness.config.placement import Placement, resolve_split
from harness.config.registries import SCHEDULES
from harness.cost_model.memory_plan import GIB, Item, Lengths, MemoryPlan, PoolMemory, plan_memory


@dataclass(frozen=True)
class PlannedMemory:
    """The memory plan of a job. messages: what was chosen for the machine. fixes: what makes it fit, where it does
    not. as_simulated: whether samples are as long as those of a simulation, by their costs."""

    config: JobConfig
    machine: Machine
    placement: Placement
    lengths: Lengths
    plan: MemoryPlan
    messages: tuple[str, ...]
    fixes: tuple[str, ...]
    as_simulated: bool = False


def planned_memory(arguments: Sequence[str]) -> PlannedMemory:
    """The memory plan of a real job with these settings on GPUs of its `device`, or of this machine where no device is
    named. On GPUs that are not here samples are as long as those that are simulated, unless max_tokens is given. Raises
    ConfigError where the job cannot be made, or does not divide."""
    config = without_hub(compose_job(arguments))
    given = given_by(arguments)
    machine = described_machine(config, given)
    if not {"cluster", "cluster.devices"} & given:
        config = changed(config, {"cluster.devices": machine.gpus})
    own = config
    if machine != this_machine():
        config = as_long_as_simulated(config, given)
    schedule = make_schedule(config)
    job = fit_to_gpus(config, schedule, given, machine)
    # Of what no run is made for too, by the settings that need least.
    settings, _ = leanest(job.config, schedule, given, machine, lengths_of(config))
    job = FittedJob(changed(job.config, settings), {**job.settings, **settings})
    placement = resolve_split(job.config.schedule.split, job.config.cluster.devices, device_roles(job.config))
    lengths = lengths_of(job.config)
    setting = real_setting(job.config, schedule, machine, lengths, gpu=True)
    plan = plan_memory(job.config, placement, setting)
    fixes = () if plan.fits else tuple(changes_that_fit(job.config, schedule, machine, lengths))
    return PlannedMemory(
        job.config, machine, placement, lengths, plan, job.messages, fixes, config.max_tokens != own.max_tokens
    )


def described_machine(config: JobConfig, given: Collection[str]) -> Machine:
    """GPUs as `device` describes them, where it is named or there are none here: DEVICES, or a node of them."""
    here = this_machine()
    if here.gpus and "device" not in given:
        return here
    device = config.device
    gpus = config.cluster.devices if {"cluster", "cluster.devices"} & set(given) else device.per_node
    return described(device, gpus)


def refusal(found: PlannedMemory) -> str:
    """The message by which a real run would refuse the job, whatever is installed here; empty where it is accepted."""
    config = replace(found.config, backend="real")
    plan = plan_job if found.machine == this_machine() else plan_elsewhere
    try:
        plan(config, make_schedule(config), found.machine)
    except ConfigError as error:
        return str(error)
    return ""


def every_schedule(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """The job under each schedule, by `COLUMNS`; of one that these devices cannot be split for, the reason."""
    made = []
    for name in SCHEDULES:
        try:
            made.append(row(planned_memory([f"schedule={name}", *arguments])))
        except ConfigError as error:
            made.append((name, "", "", "", "", _short(str(error)), ""))
    return made


COLUMNS = ("schedule", "devices", "weights", "rollout", "training", "a real run", "chosen")
"""Columns of a table with a row for each schedule. weights: masters and copies on a device, GiB, rollout's /
training's, or of the pool that they share; rollout, training: the most that lies on a device, GiB, and when."""


def merged(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A row for the schedules of which all the same is to be said."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    return [(", ".join(alike), *cells) for cells, alike in names.items()]


def row(found: PlannedMemory) -> tuple[str, ...]:
    """Table row of one job, by `COLUMNS`."""
    plan, told = found.plan, refusal(found)
    engine, trainer = (next(pool for pool in plan.pools if role in pool.roles) for role in ("rollout", "actor"))
    pools = [engine] if engine is trainer else [engine, trainer]
    devices = " + ".join(str(pool.devices) for pool in plan.pools)
    weights = " / ".join(f"{pool.weights / GIB:.1f}" for pool in pools)
    peaks = [f"{pool.peak / GIB:.1f} ({pool.peak_phase})" for pool in pools]
    chosen = " ".join(found.messages).partition(": ")[2]
    return (found.config.schedule.name, devices, weights, peaks[0], peaks[-1], _short(told), chosen)


def _short(told: str) -> str:
    """A refusal up to its advice."""
    return f"no: {told.partition(';')[0].partition(', and may use')[0]}" if told else "yes"


def rows(pool: PoolMemory) -> list[tuple[str, list[float | None]]]:
    """A row for each thing that lies on a device of the pool, in GiB in each of its phases; None where it does not."""
    return [(item.what, [_gib(item, phase) for phase in pool.phases]) for item in pool.items if item.bytes]


def _gib(item: Item, phase: str) -> float | None:
    return item.bytes / GIB if phase in item.phases else None
