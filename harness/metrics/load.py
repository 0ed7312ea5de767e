"""How busy the machine was with other things while a run was measured."""

from __future__ import annotations

import os
import time

import psutil


class LoadWatch:
    """Watches from its making on; `so_far` is what the manifest holds as `load`."""

    def __init__(self) -> None:
        self._average = _load_average()
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def so_far(self) -> dict[str, float]:
        """`average_at_start`, `average_at_end`: runnable processes per core, over a minute, this run's own included.
        `others`: share of these cores that other processes kept busy meanwhile, or that the machine's host took away.
        """
        elapsed = max(time.monotonic() - self._began, 1e-9)
        others = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        return {
            "average_at_start": round(self._average, 3),
            "average_at_end": round(_load_average(), 3),
            "others": round(min(1.0, max(0.0, others / elapsed / len(_cores()))), 3),
        }


def _cores() -> list[int]:
    """Those that this process may use."""
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


def _own_seconds() -> float:
    """Seconds of processor time of this process and all below it, those that have ended included."""
    process, total = psutil.Process(), 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:  # ended meanwhile: its parent has its time
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
