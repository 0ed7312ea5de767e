"""The memory of a GPU that several processes share, where a turn on it passes from this process to an engine's.

An allocator keeps what was freed, for its own process alone. So before an engine takes memory back, the worker beside
it gives back what it does not use, and sees that there is enough: an engine that finds too little dies, and says less.
"""

from __future__ import annotations

import os

import torch

from harness.config.machine import gpu_processes

_MIB = 1 << 20


def pass_to_engine(device: torch.device, needed: float, what: str) -> None:
    """Give what this process does not use of a GPU back to it, for an engine that takes `needed` bytes for `what` next.

    Raises MemoryError, with who holds the rest, where less is free. Does nothing on a CPU.
    """
    if device.type != "cuda":
        return
    give_back(device)
    free, total = torch.cuda.mem_get_info(device)
    if free < needed:
        raise MemoryError(_too_little(device, needed, what, free, total))


def give_back(device: torch.device) -> None:
    """Return a GPU's blocks that no tensor uses; those of buckets that another process had mapped, once it let go of
    them. Does nothing on a CPU."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def _too_little(device: torch.device, needed: float, what: str, free: int, total: int) -> str:
    used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    others = {pid: mine for pid, mine in gpu_processes(uuid).items() if pid != os.getpid()}
    named = ", ".join(f"process {pid} {mine // _MIB}" for pid, mine in sorted(others.items()))
    return (
        f"{what} needs {needed / _MIB:.0f} MiB of {device}, and {free // _MIB} of {total // _MIB} are free: tensors of "
        f"this process hold {used // _MIB}, gaps between them {(held - used) // _MIB}, "
        f"{named or f'others, and what CUDA itself needs, {(total - free - held) // _MIB}'}"
    )
