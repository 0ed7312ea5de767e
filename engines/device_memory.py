"""The memory of a GPU that several processes share, where a turn on it passes from this process to an engine's.

An allocator keeps what was freed, for its own process alone. So before an engine takes memory back, the worker beside
it gives back what it does not use, and sees that there is enough: an engine that finds too little dies, and says less.
"""

import os

import torch

from harness.config.machine import gpu_free, gpu_processes, gpus

_MIB = 1 << 20


def pass_to_engine(device: torch.device, needed: float, what: str, others: int = 0) -> None:
    """Give what this process does not use of a GPU back to it, for an engine that takes `needed` bytes for `what` next,
    and of so many others after it, whose workers have done the same.

    Raises MemoryError, with who holds the rest, where less is free. Does nothing on a CPU.
    """
    if device.type != "cuda":
        return
    give_back(device)
    free, total = torch.cuda.mem_get_info(device)
    if free < needed:
        raise MemoryError(_too_little(f"{device}", needed, what, free, total) + _holders(device, free, total))
    for other in gpus()[1 : 1 + others] if others else ():
        free = gpu_free(other.uuid)  # of CUDA it would take a context there
        if free < needed:
            said = _too_little(f"GPU {other.visible_as}", needed, what, free, other.memory_bytes)
            raise MemoryError(said + (_others(other.uuid) or "others hold the rest"))


def give_back(device: torch.device) -> None:
    """Return a GPU's blocks that no tensor uses; those of buckets that another process had mapped, once it let go of
    them. Does nothing on a CPU."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def _too_little(where: str, needed: float, what: str, free: int, total: int) -> str:
    return f"{what} needs {needed / _MIB:.0f} MiB of {where}, and {free // _MIB} of {total // _MIB} are free: "


def _holders(device: torch.device, free: int, total: int) -> str:
    used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    named = _others(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return (
        f"tensors of this process hold {used // _MIB}, gaps between them {(held - used) // _MIB}, "
        f"{named or f'others, and what CUDA itself needs, {(total - free - held) // _MIB}'}"
    )


def _others(uuid: str) -> str:
    """Other processes of a GPU, with the MiB that each holds; empty where the driver does not say."""
    others = {pid: mine for pid, mine in gpu_processes(uuid).items() if pid != os.getpid()}
    return ", ".join(f"process {pid} {mine // _MIB}" for pid, mine in sorted(others.items()))
