"""The hardware of this machine, asked without loading torch."""

import math
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.config import DeviceConfig
from harness.config.fields import ConfigError, whole_number


@dataclass(frozen=True)
class Machine:
    """The hardware of a machine. cores: those this process may use. gpus: that it may use, instances of divided ones
    one by one. gpu_bytes: memory of the smallest. divided: whether there are such instances (MIG). nodes: that the GPUs
    stand in. host_bytes: memory of the host of the smallest of them."""

    cores: int
    gpus: int
    gpu_bytes: int
    divided: bool = False
    nodes: int = 1
    host_bytes: float = math.inf


NO_MACHINE = Machine(cores=0, gpus=0, gpu_bytes=0)
"""The machine of a simulated job, which asks nothing of it."""


def installed(package: str) -> str | None:
    """The version of a distribution that is installed here; None where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def this_machine() -> Machine:
    """The cores and GPUs that this process may use."""
    found = gpus()
    smallest = min((gpu.memory_bytes for gpu in found), default=0)
    divided = any(gpu.instance for gpu in found)
    return Machine(len(os.sched_getaffinity(0)), len(found), smallest, divided, host_bytes=host_bytes())


def host_bytes() -> int:
    """Memory of this host that its processes may use: what there is, or what their control group allows (as a
    container's limit does)."""
    import psutil

    there = int(psutil.virtual_memory().total)
    try:
        allowed = _ALLOWED.read_text(encoding="ascii").strip()
    except OSError:  # not in a container, or with control groups of the first kind
        return there
    return there if (limit := whole_number(allowed)) is None else min(there, limit)


_ALLOWED = Path("/sys/fs/cgroup/memory.max")


def described(device: DeviceConfig, gpus: int) -> Machine:
    """A machine of so many GPUs as `device` describes, in nodes of as many as it says, with the cores of this one."""
    cores, nodes = len(os.sched_getaffinity(0)), -(-gpus // device.per_node)
    return Machine(cores, gpus, int(device.memory_bytes), nodes=nodes, host_bytes=device.host_memory_bytes)


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


VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """A device for CUDA: a GPU, or an instance of one that is divided (MIG), which has its own share of its memory.

    name: as the driver has it; an instance's ends in its profile, such as "MIG 3g.40gb". visible_as: how
    CUDA_VISIBLE_DEVICES names it alone. gpu_uuid: of the whole GPU, its own where it is not divided.
    """

    name: str
    uuid: str
    memory_bytes: int
    visible_as: str
    gpu_uuid: str

    @property
    def instance(self) -> bool:
        """Whether it is an instance of a divided GPU."""
        return self.gpu_uuid != self.uuid

    def __str__(self) -> str:
        return f"{self.name}, {self.memory_bytes >> 20} MiB"


@contextmanager
def nvml() -> Iterator[ModuleType | None]:
    """NVIDIA's library, started; None where there is no driver. Raises ConfigError where the driver does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    except pynvml.NVMLError as error:
        raise _silent(error) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _silent(error) from error
    finally:
        pynvml.nvmlShutdown()


def _silent(error: Exception) -> ConfigError:
    return ConfigError(
        f"NVIDIA's driver does not say which GPUs there are: {error}; see what nvidia-smi says, or set "
        f"{VISIBLE}= (empty) to run on cores"
    )


def gpus() -> tuple[Gpu, ...]:
    """GPUs that CUDA shows this process, in its order; instances count one by one, where a GPU is divided.

    Indices are taken in the order of the driver, by bus, as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID; GPUs of one
    kind have that order anyway.
    """
    wanted = os.environ.get(VISIBLE)
    if wanted is not None and not _names(wanted):
        return ()
    with nvml() as library:
        if library is None:
            return ()
        there = [_devices(library, index) for index in range(library.nvmlDeviceGetCount())]
    return tuple(_chosen(wanted, there))


def cpu_model() -> str:
    """The maker's name of this machine's CPU, as far as the kernel or Python knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def gpu_free(uuid: str) -> int:
    """Free bytes of a GPU that this process can see, as its driver counts them."""
    with nvml() as library:
        assert library is not None, "a GPU has a driver"
        return int(library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByUUID(uuid)).free)


def gpu_processes(uuid: str) -> dict[int, int]:
    """Bytes of a GPU that each process holds, by its id; empty where the driver does not say, as inside of a container
    that sees no processes but its own."""
    with nvml() as library:
        if library is None:
            return {}
        try:
            found = library.nvmlDeviceGetComputeRunningProcesses(library.nvmlDeviceGetHandleByUUID(uuid))
        except library.NVMLError:
            return {}
    return {process.pid: process.usedGpuMemory for process in found if process.usedGpuMemory}


def _devices(library: Any, index: int) -> list[Gpu]:
    """GPU `index`, or its instances."""
    handle = library.nvmlDeviceGetHandleByIndex(index)
    whole = library.nvmlDeviceGetUUID(handle)
    if not _divided(library, handle):
        return [_gpu(library, handle, whole, str(index))]
    found = []
    for place in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except library.NVMLError_NotFound:  # fewer were made than could be
            continue
        found.append(_gpu(library, instance, whole))
    return found


def _divided(library: Any, handle: Any) -> bool:
    try:
        return bool(library.nvmlDeviceGetMigMode(handle)[0])
    except library.NVMLError_NotSupported:
        return False


def _gpu(library: Any, handle: Any, whole: str, index: str | None = None) -> Gpu:
    uuid, memory = library.nvmlDeviceGetUUID(handle), int(library.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(library.nvmlDeviceGetName(handle), uuid, memory, uuid if index is None else index, whole)


def _names(wanted: str) -> list[str]:
    """Entries of CUDA_VISIBLE_DEVICES. As for CUDA, the first that can be no device (-1) ends the list."""
    found: list[str] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if whole_number(entry) is None and not entry.startswith(("GPU-", "MIG-")):
            break
        found.append(entry)
    return found


def _chosen(wanted: str | None, there: Sequence[Sequence[Gpu]]) -> list[Gpu]:
    """GPUs in the order of `wanted`; the first that is not there ends the list, and one that is named twice makes it
    empty, both as for CUDA. A divided GPU stands for all its instances."""
    if wanted is None:
        return [gpu for devices in there for gpu in devices]
    found: dict[str, Gpu] = {}
    for entry in _names(wanted):
        named = _named(entry, there)
        if not named:
            break
        if any(gpu.uuid in found for gpu in named):
            return []
        found |= {gpu.uuid: gpu if gpu.instance else replace(gpu, visible_as=entry) for gpu in named}
    return list(found.values())


def _named(entry: str, there: Sequence[Sequence[Gpu]]) -> list[Gpu]:
    """GPUs by index, or by the beginning of a UUID, which has to be that of one device only."""
    if (index := whole_number(entry)) is not None:
        return list(there[index]) if index < len(there) else []
    if entry.startswith("MIG-"):
        alike = [gpu for devices in there for gpu in devices if gpu.instance and gpu.uuid.startswith(entry)]
        return alike if len(alike) == 1 else []
    of = [devices for devices in there if devices and devices[0].gpu_uuid.startswith(entry)]
    return list(of[0]) if len(of) == 1 else []
