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
