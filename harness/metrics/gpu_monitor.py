"""How busy the GPUs are, in the form of MLflow's monitors and beside them: its page has names and units from there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from harness.config.gpus import gpus


class GpuMonitor:
    """Of every GPU that the run may use: `gpu_<n>_...`, n as the run numbers its devices.

    What a device does not tell is left out: an instance of a divided GPU tells its memory only.
    """

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._library: Any = pynvml
        self._handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus()]
        self._samples: dict[str, list[float]] = defaultdict(list)

    def collect_metrics(self) -> None:
        """Ask every device once."""
        for number, handle in enumerate(self._handles):
            for read in _READINGS:
                try:
                    found = read(self._library, handle)
                except self._library.NVMLError:  # not supported, or not now: the sample has no such value
                    continue
                for name, value in found.items():
                    self._samples[f"gpu_{number}_{name}"].append(value)

    def aggregate_metrics(self) -> dict[str, float]:
        """The mean of what was told since the last `clear_metrics`."""
        return {name: round(sum(values) / len(values), 1) for name, values in self._samples.items()}

    def clear_metrics(self) -> None:
        self._samples.clear()


def _memory(library: Any, handle: Any) -> dict[str, float]:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_usage_percentage": 100 * memory.used / memory.total, "memory_usage_megabytes": memory.used / 1e6}


def _utilization(library: Any, handle: Any) -> dict[str, float]:
    return {"utilization_percentage": library.nvmlDeviceGetUtilizationRates(handle).gpu}


def _power(library: Any, handle: Any) -> dict[str, float]:
    drawn, limit = library.nvmlDeviceGetPowerUsage(handle), library.nvmlDeviceGetEnforcedPowerLimit(handle)
    return {"power_usage_watts": drawn / 1000, "power_usage_percentage": 100 * drawn / limit}


def _temperature(library: Any, handle: Any) -> dict[str, float]:
    return {"temperature_celsius": library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)}


_READINGS: tuple[Callable[[Any, Any], dict[str, float]], ...] = (_memory, _utilization, _power, _temperature)
