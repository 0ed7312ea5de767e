"""What this machine has, asked without loading torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from harness.config import DeviceConfig
from harness.config.gpus import gpus


@dataclass(frozen=True)
class Machine:
    """cores: those this process may use. gpus: that it may use, instances of divided ones one by one. gpu_bytes:
    memory of the smallest. divided: whether there are such instances (MIG). nodes: that the GPUs stand in."""

    cores: int
    gpus: int
    gpu_bytes: int
    divided: bool = False
    nodes: int = 1


def this_machine() -> Machine:
    found = gpus()
    smallest = min((gpu.memory_bytes for gpu in found), default=0)
    return Machine(len(os.sched_getaffinity(0)), len(found), smallest, any(gpu.instance for gpu in found))


def described(device: DeviceConfig, gpus: int) -> Machine:
    """So many GPUs as `device` says, in nodes of as many as it says, with the cores of this machine."""
    cores = len(os.sched_getaffinity(0))
    return Machine(cores, gpus, int(device.memory_bytes), nodes=-(-gpus // device.per_node))


GPU_KINDS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA H20": "h20",
    "NVIDIA H800": "h800",
    "NVIDIA GB200": "gb200",
}
"""Names that the driver gives, and the file of experiments/device that is of them. Of others no peak is known here."""


def gpu_kind() -> str | None:
    """The file of this machine's GPUs; None where there are none, several kinds, or one that is not known, such as an
    instance of a divided GPU: of its peak nothing is known."""
    names = {gpu.name for gpu in gpus()}
    return GPU_KINDS.get(names.pop()) if len(names) == 1 else None
