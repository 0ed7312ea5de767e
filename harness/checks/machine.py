"""Whether a machine has the devices and the memory of a job. Raises HardwareMissing for what another one could do."""

from collections.abc import Sequence
from typing import Any

from harness.checks.layout import capacity_rows, check_layout, device_roles
from harness.config import ConfigError, JobConfig
from harness.config.compose import as_arguments, changed
from harness.config.machine import Machine, host_bytes
from harness.config.placement import Communicator, Placement, resolve_split
from harness.config.transports import transport_of
from harness.cost_model.host_memory import HostMemory, Hosts
from harness.cost_model.job_cost import too_much
from harness.cost_model.memory import EngineMemory
from harness.cost_model.memory_plan import (
    USABLE,
    EngineShare,
    Lengths,
    MemoryPlan,
    PlanSetting,
    engine_share,
    plan_memory,
)
from schedules import Schedule

_GIB = 1 << 30


class HardwareMissing(ConfigError):
    """The job is sound, and cannot run for real here."""


def check_devices(config: JobConfig, schedule: Schedule, placement: Placement, machine: Machine, gpu: bool) -> None:
    """Raises HardwareMissing where the machine has fewer devices than the job needs."""
    needed, threads = placement.total, config.cluster.threads_per_device
    there = machine.gpus if gpu else machine.cores // threads
    if gpu and there and config.cluster.oversubscribe:
        _check_trial(config, there)
        return
    if needed <= there or config.cluster.oversubscribe:
        return
    if gpu and not there:
        raise ConfigError("cluster.kind=gpu: this machine has no GPU; set cluster.kind=cpu")
    fixes = [f"set cluster.devices={there}"] if _fits(config, there) else []
    if gpu and there == 1 and not schedule.colocated:
        fixes.append("schedule=colocate_sync, whose roles take turns on one")
    fixes.append("cluster.kind=cpu to use cores" if gpu else "cluster.oversubscribe=true to share cores")
    kind = _count(there, "GPU") if gpu else _count(machine.cores, "core")
    each = f" of {threads} threads" if threads > 1 and not gpu else ""
    raise HardwareMissing(
        f"the job needs {_count(needed, 'device')}{each}, this machine has {kind}; {', or '.join(fixes)}"
    )


def _check_trial(config: JobConfig, gpus: int) -> None:
    """Processes may share a GPU to try that they run: on one, and as what is no result."""
    if gpus > 1:
        raise ConfigError(
            f"cluster.oversubscribe=true is a trial on one GPU, and there are {gpus}; leave it out, or name one in "
            "CUDA_VISIBLE_DEVICES"
        )
    if not config.smoke:
        raise ConfigError("cluster.oversubscribe=true on a GPU is a trial, which measures nothing; set smoke=true")


def check_trial_groups(groups: Sequence[Communicator]) -> None:
    """Check that all but weights, which then travel over Gloo, has a process of its own: NCCL joins no two of a GPU."""
    for group in groups:
        if group.over == "device" and not group.name.startswith("weights of"):
            raise HardwareMissing(
                f"cluster.oversubscribe=true: {group.name} has {len(group.members)} ranks on one GPU, which NCCL joins "
                "to no group; give each role one device, as in cluster.devices=2"
            )


def _fits(config: JobConfig, devices: int) -> bool:
    """Whether the split can be made over this many devices, so that the advice to use so many is sound."""
    try:
        return devices > 0 and resolve_split(config.schedule.split, devices, device_roles(config)).total <= devices
    except ConfigError:
        return False


def check_machine_memory(
    config: JobConfig, schedule: Schedule, placement: Placement, machine: Machine, setting: PlanSetting
) -> MemoryPlan:
    """Return what lies on the devices: GPUs each hold what is on them, devices of a CPU job hold it together, beside
    what processes need anyway."""
    plan = plan_memory(config, placement, setting)
    if plan.devices_fit if setting.gpu else plan.everything <= setting.device_bytes:
        on_devices = 0.0 if setting.gpu else plan.everything
        if plan.host is not None and on_devices + plan.host.everything > plan.host.there:
            raise HardwareMissing(_too_much_of_host(config, plan.host, on_devices))
        return plan
    if setting.gpu:
        found = changes_that_fit(config, schedule, machine, setting.lengths)
        fix = f"{', or '.join(found)}, backend=virtual to simulate it" if found else "backend=virtual simulates it"
        if plan.together:
            raise HardwareMissing(
                f"model={config.model.name}: processes that share the GPU need {plan.everything / _GIB:.1f} GiB, and "
                f"may use {plan.there / _GIB:.1f} GiB; {f'use {found[0]}, or' if found else 'use'} model=tiny"
            )
        raise HardwareMissing(
            f"{too_much(config, plan, plan.fullest)} of the {machine.gpu_bytes / _GIB:.1f} GiB of a GPU here; "
            f"use {fix}, or model=tiny"
        )
    raise HardwareMissing(
        f"model={config.model.name} needs {plan.everything / _GIB:.1f} GiB for its training state, its activations and "
        f"the copies of its weights, and there is no GPU and {setting.device_bytes / _GIB:.1f} GiB of memory here; "
        "use more or larger GPUs, backend=virtual to simulate it, or model=tiny"
    )


def _too_much_of_host(config: JobConfig, host: HostMemory, on_devices: float) -> str:
    """A refusal. on_devices: bytes of devices that are cores of the host."""
    largest = host.largest
    of_devices = f" beside {on_devices / _GIB:.1f} of its devices" if on_devices else ""
    fix = f"set {largest.fix}, " if largest.fix else ""
    return (
        f"model={config.model.name} needs {host.everything / _GIB:.1f} GiB of a host's memory{of_devices} "
        f"({largest.bytes / _GIB:.1f} of them for {largest.what}), and may use {host.there / _GIB:.1f} GiB; {fix}"
        "use hosts with more memory, or backend=virtual to simulate it"
    )


def share_of_engines(config: JobConfig, plan: MemoryPlan, setting: PlanSetting, role: str) -> EngineShare:
    """Return what a rollout engine of this role may take of a device, in a job that this machine holds."""
    token = EngineMemory(config.model, config.engine, setting.lengths.sample).token
    return engine_share(plan, setting, token, role)


def real_setting(
    config: JobConfig, schedule: Schedule, machine: Machine, lengths: Lengths, *, gpu: bool
) -> PlanSetting:
    """The circumstances of a plan for this machine. device_bytes: of a GPU; without GPUs of all devices together, of
    which all may be used."""
    given = config.cluster.memory_gib
    if gpu:
        here = float(machine.gpu_bytes) if given is None else given * _GIB
        hosts = Hosts(max(1, machine.gpus // machine.nodes), USABLE * machine.host_bytes)
    else:
        here = host_bytes() if given is None else given * _GIB * config.cluster.devices
        hosts = Hosts(config.cluster.devices, here)
    return PlanSetting(
        lengths,
        here,
        schedule.transport,
        gpu=gpu,
        usable=USABLE if gpu else 1.0,
        together=gpu and config.cluster.oversubscribe,
        hosts=hosts,
        rows=capacity_rows(config, schedule),
        keeps_weights=not schedule.loads_after_each_batch,
    )


def changes_that_fit(config: JobConfig, schedule: Schedule, machine: Machine, lengths: Lengths) -> list[str]:
    """Settings under which the GPUs hold the job, each by itself or with those before it."""
    found: list[str] = []
    tries: tuple[dict[str, Any], ...] = (
        {"training.recompute_activations": True},
        {"training.tokens_per_micro_batch": lengths.sample},
        {"training.recompute_activations": True, "training.tokens_per_micro_batch": lengths.sample},
        {"training.optimizer_offload": "between_phases"},
        {"training.optimizer_offload": "always"},
        {
            "training.optimizer_offload": "always",
            "training.recompute_activations": True,
            "training.tokens_per_micro_batch": lengths.sample,
        },
        {"algorithm.reference": False, "algorithm.kl_coef": 0.0},
        {"engine.slots": config.algorithm.group_size},
        *({"cluster.devices": devices} for devices in range(config.cluster.devices + 1, 65)),
    )
    for settings in tries:
        other = changed(config, settings)
        if other == config:
            continue
        try:
            placement = check_layout(other, schedule)
        except ConfigError:
            continue
        setting = real_setting(other, schedule, machine, lengths, gpu=True)
        if plan_memory(other, placement, setting).fits:
            found.append(as_arguments(settings))
            if "cluster.devices" in settings:
                break
    return found[:3]


def check_instances(groups: Sequence[Communicator], machine: Machine, gpu: bool) -> None:
    """NCCL knows a device by its bus, which instances of one GPU share."""
    joined = [group.name for group in groups if group.over == "device"]
    if gpu and machine.divided and joined:
        raise HardwareMissing(
            f"this machine's devices are instances of divided GPUs (MIG), which NCCL joins to no group, and the job "
            f"has {', '.join(map(repr, joined))}; use schedule=colocate_sync cluster.devices=1, or name GPUs that are "
            "not divided in CUDA_VISIBLE_DEVICES"
        )


def check_nodes(schedule: Schedule, placement: Placement, machine: Machine, gpu: bool) -> None:
    """Check that what processes share by a path or a handle stays on their host."""
    if machine.nodes < 2 or not transport_of(schedule.transport).one_host:
        return
    per_node = (machine.gpus if gpu else machine.cores) // machine.nodes
    if placement.total > per_node:
        raise HardwareMissing(
            f"transport={schedule.transport} shares memory inside of one host, and {placement.total} devices stand in "
            f"{machine.nodes} nodes of {per_node}; set cluster.devices={per_node}, or give the schedule transport = "
            '"collective"'
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
