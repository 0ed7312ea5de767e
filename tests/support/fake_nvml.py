"""NVIDIA's management library as a module that is made up: GPUs of any number, of which some are divided."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

MIB = 1 << 20


@dataclass
class FakeGpu:
    """instances: None where the GPU cannot be divided, else (profile, MiB) or None for a place that is free."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    mib: int = 81559
    instances: list[tuple[str, int] | None] | None = None
    divided: bool = False
    used_mib: int = 0
    utilization: int = 0
    milliwatts: int = 0
    celsius: int = 0
    mute: bool = False
    parts: list["FakeGpu"] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [
            FakeGpu(f"MIG-{self.uuid[4:]}-{place}", f"{self.name} MIG {made[0]}", made[1], mute=True)
            for place, made in enumerate(self.instances or [])
            if made is not None
        ]


class FakeNvml(ModuleType):
    """What Cadence calls of pynvml, by its names."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    class NVMLError_LibRmVersionMismatch(NVMLError):
        pass

    def __init__(self, gpus: list[FakeGpu], broken: type[Exception] | None = None) -> None:
        super().__init__("pynvml")
        self.gpus, self.broken, self.started = gpus, broken, 0

    def nvmlInit(self) -> None:
        if self.broken is not None:
            raise self.broken("Driver/library version mismatch")
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.started
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        (found,) = [gpu for whole in self.gpus for gpu in (whole, *whole.parts) if gpu.uuid == uuid]
        return found

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> Any:
        return SimpleNamespace(total=handle.mib * MIB, used=handle.used_mib * MIB)

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        if handle.instances is None:
            raise self.NVMLError_NotSupported
        return [int(handle.divided)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return len(handle.instances or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, place: int) -> FakeGpu:
        made = [part for part in handle.parts if part.uuid.endswith(f"-{place}")]
        if not made:
            raise self.NVMLError_NotFound
        return made[0]

    def _told(self, handle: FakeGpu, value: Any) -> Any:
        if handle.mute:
            raise self.NVMLError_NotSupported
        return value

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        return self._told(handle, SimpleNamespace(gpu=handle.utilization))

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        return self._told(handle, handle.milliwatts)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: FakeGpu) -> int:
        return self._told(handle, 700_000)

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._told(handle, handle.celsius)


def install(monkeypatch: Any, *gpus: FakeGpu, visible: str | None = None, broken: Any = None) -> FakeNvml:
    """Put it in the place of pynvml, with these GPUs, and CUDA_VISIBLE_DEVICES as given."""
    library = FakeNvml(list(gpus), broken)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return library
