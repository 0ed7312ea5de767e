"""How many devices a comparison gets where nobody says: the same for every cell, on which most of them can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.comparison.running.cells import WantedCell
from harness.config import ConfigError, JobConfig
from harness.config.checks.job import plan_job
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import Machine

_MOST = 8  # devices; no schedule needs more to run at all
_CHOSEN = ("cluster", "cluster.devices", "algorithm.micro_batch_groups", "schedule.split")
_BATCH = "algorithm.micro_batch_groups"


def common_ground(wanted: Sequence[WantedCell], machine: Machine) -> list[str]:
    """Settings of devices and of micro-batches under which most cells run for real: the fewest devices, then the
    largest micro-batches. Empty where the settings as they are do, where the user chose, or nothing runs for real.

    Micro-batches matter because each rank trains on whole ones, and a schedule that shares all devices has more ranks.
    """
    names = {setting.partition("=")[0] for cell in wanted for setting in cell.settings}
    if any(name.startswith(_CHOSEN[1:]) or name == _CHOSEN[0] for name in names):
        return []
    jobs = _composed(wanted)
    if not jobs:
        return []
    first = jobs[0]
    here = machine.gpus or machine.cores // first.cluster.threads_per_device
    most = max(first.cluster.devices, _MOST if first.cluster.oversubscribe else min(_MOST, here))
    grounds = [
        (devices, groups)
        for devices in range(first.cluster.devices, most + 1)
        for groups in range(first.algorithm.micro_batch_groups, 0, -1)
        if first.algorithm.batch_groups % groups == 0
    ]
    able = {ground: sum(_runs(_on(job, *ground), machine) for job in jobs) for ground in grounds}
    devices, groups = max(grounds, key=lambda ground: able[ground])  # the first of those that are as good
    found = {"cluster.devices": devices, _BATCH: groups}
    asked = {"cluster.devices": first.cluster.devices, _BATCH: first.algorithm.micro_batch_groups}
    return [f"{name}={value}" for name, value in found.items() if value != asked[name]]


def _composed(wanted: Sequence[WantedCell]) -> list[JobConfig]:
    """What can be composed at all: the others are refused elsewhere."""
    jobs = []
    for cell in wanted:
        try:
            jobs.append(compose_job(cell.settings))
        except ConfigError:
            continue
    return jobs


def _on(job: JobConfig, devices: int, groups: int) -> JobConfig:
    return replace(
        job,
        cluster=replace(job.cluster, devices=devices),
        algorithm=replace(job.algorithm, micro_batch_groups=groups),
    )


def _runs(job: JobConfig, machine: Machine) -> bool:
    try:
        return plan_job(job, make_schedule(job), machine).backend == "real"
    except ConfigError:
        return False
