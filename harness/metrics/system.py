"""How busy the machine is while a run goes on: sampled now and then, on a thread of its own.

Names and values are those of MLflow's own monitors, so that its page shows them under "System metrics". Import it only
where it is used: it loads mlflow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import psutil
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

Sample = Mapping[str, float]
"""`time` (seconds since 1970) and `system/...`: percentages and megabytes."""


class SystemSampler:
    """Hands a sample to every listener each `seconds`, and a last one when it is closed.

    As a context manager it starts and closes. What a listener raises ends the sampling and is raised by `close`.
    """

    def __init__(self, listeners: Sequence[Callable[[Sample], None]], seconds: float = 10.0) -> None:
        self._listeners, self._seconds = listeners, seconds
        self._monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor(), *_gpus()]
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._sample_now_and_then, name="system-metrics", daemon=True)

    def __enter__(self) -> SystemSampler:
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

    def _sample_now_and_then(self) -> None:
        """Consumes nothing, produces samples; ends with the one after `close`."""
        try:
            psutil.cpu_percent()  # it tells the share since this thread's last call, the first time nothing
            while not self._closing.wait(self._seconds):
                self._hand_out()
            self._hand_out()
        except BaseException as failure:  # raised again by `close`, on the caller's thread
            self._failure = failure

    def _hand_out(self) -> None:
        sample = {"time": time.time()}
        for monitor in self._monitors:
            monitor.collect_metrics()
            sample |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        for listener in self._listeners:
            listener(sample)


def _gpus() -> list[GPUMonitor]:
    """A monitor of NVIDIA GPUs, where there are any and nvidia-ml-py is installed."""
    try:
        return [GPUMonitor()]
    except (ImportError, RuntimeError):  # what it raises without the package, and without a GPU
        return []
