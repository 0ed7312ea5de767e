"""What this machine has, asked without loading torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """cores: those this process may use. gpu_bytes: memory of the smallest GPU."""

    cores: int
    gpus: int
    gpu_bytes: int


def this_machine() -> Machine:
    memories = _gpu_memories()
    return Machine(len(os.sched_getaffinity(0)), len(memories), min(memories, default=0))


def _gpu_memories() -> list[int]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return [int(line) << 20 for line in answer.stdout.split() if line.isdigit()] if answer.returncode == 0 else []


GPU_KINDS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA H20": "h20",
    "NVIDIA H800": "h800",
    "NVIDIA GB200": "gb200",
}
"""Names that nvidia-smi gives, and the file of experiments/device that is of them. Of others no peak is known here."""


def gpu_kind() -> str | None:
    """The file of this machine's GPUs; None where there are none, several kinds, or one that is not known."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    names = {line.strip() for line in answer.stdout.splitlines() if line.strip()} if answer.returncode == 0 else set()
    return GPU_KINDS.get(names.pop()) if len(names) == 1 else None
