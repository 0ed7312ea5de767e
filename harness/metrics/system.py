"""How busy the machine is while a run goes on: samples in the course of it, and how much of it was other processes."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import psutil

from harness.config.machine import gpus

Sample = Mapping[str, float]  # `time` (seconds since 1970) and `system/...`: percentages and megabytes


class SystemSampler:
    """Calls every listener with a sample each `seconds`, on a thread of its own, and with a last one when it is closed.
    Names and values are those of MLflow's own monitors, so that its page shows them under "System metrics". As a
    context manager it starts and closes. What a listener raises ends the sampling and is raised by `close`."""

    def __init__(self, listeners: Sequence[Callable[[Sample], None]], seconds: float = 10.0) -> None:
        self._listeners, self._seconds = listeners, seconds
        self._monitors = _monitors()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._sample_until_closed, name="system-metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the last sample and stop. Closing twice does nothing."""
        self._closing.set()
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _sample_until_closed(self) -> None:
        """Consumes nothing, produces samples; ends with the one after `close`."""
        try:
            psutil.cpu_percent()  # measures from this thread's last call on; the first value is meaningless
            while not self._closing.wait(self._seconds):
                self._take()
            self._take()
        except BaseException as failure:  # raised again by `close`, on the caller's thread
            self._failure = failure

    def _take(self) -> None:
        sample = {"time": time.time()}
        for monitor in self._monitors:
            monitor.collect_metrics()
            sample |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        for listener in self._listeners:
            listener(sample)


def _monitors() -> list[Any]:
    """MLflow's, which takes seconds to load, and one of NVIDIA GPUs where there are any."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    return [CPUMonitor(), DiskMonitor(), NetworkMonitor(), *([GpuMonitor()] if gpus() else [])]


class LoadWatch:
    """How busy the machine was with other things since it was made; `so_far` is `load` in the manifest. root: process
    id; it and all processes below it are this run, by default the one that asks."""

    def __init__(self, root: int | None = None) -> None:
        self._average, self._root = _load_average(), root or os.getpid()
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), own_seconds(self._root)

    def so_far(self) -> dict[str, float]:
        """`average_at_start`, `average_at_end`: runnable processes per core, over a minute, this run's own included.
        `others`: share of these cores that other processes kept busy meanwhile, or that the machine's host took away.
        """
        elapsed = max(time.monotonic() - self._began, 1e-9)
        others = (_busy_seconds() - self._busy) - (own_seconds(self._root) - self._own)
        return {
            "average_at_start": round(self._average, 3),
            "average_at_end": round(_load_average(), 3),
            "others": round(min(1.0, max(0.0, others / elapsed / len(_cores()))), 3),
        }


def _cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _load_average() -> float:
    return os.getloadavg()[0] / len(_cores())


def _busy_seconds() -> float:
    """Seconds in which these cores did not wait, since the machine started."""
    every = psutil.cpu_times(percpu=True)
    waits = ("idle", "iowait", "guest", "guest_nice")  # guest time is in user time as well
    return sum(
        sum(seconds for name, seconds in every[core]._asdict().items() if name not in waits)
        for core in _cores()
        if core < len(every)
    )


def own_seconds(root: int) -> float:
    """Seconds of processor time of this process and all below it, those that have ended included."""
    process, total = psutil.Process(root), 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:  # ended meanwhile: its parent has its time
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class GpuMonitor:
    """Every GPU that the run may use, in the form of MLflow's monitors, whose page has names and units from there:
    `gpu_<n>_...`, n as the run numbers its devices. What a device does not tell is left out: an instance of a divided
    GPU tells its memory only."""

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
        """Forget the samples."""
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
