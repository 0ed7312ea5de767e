"""Processor time of processes, and how busy the machine is with other work."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

BUSY = 0.25
"""Cores kept busy by other work, from which figures are not to be trusted."""


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds of processor time that the living threads of these processes have used."""
    spent = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            spent += int(stat.read_text().split()[0])
    return spent / 1e9


def titled(*beginnings: str) -> list[int]:
    """The processes whose titles begin with one of these, such as Ray's actors."""
    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if _title(process).startswith(beginnings)]


def _title(process: Path) -> str:
    try:
        return (process / "cmdline").read_text().split("\0")[0]
    except OSError:  # it ended meanwhile
        return ""


def busy_cores(seconds: float = 1.0) -> float:
    """Cores kept busy, by anyone, while this process sleeps."""
    busy, total = _ticks()
    time.sleep(seconds)
    busy_after, total_after = _ticks()
    return (busy_after - busy) / max(1, total_after - total) * (os.cpu_count() or 1)


def wait_for_quiet(patience_s: float) -> float:
    """Cores that are busy, once that is BUSY or less, or after so many seconds."""
    until = time.monotonic() + patience_s
    while (busy := busy_cores()) > BUSY and time.monotonic() < until:
        pass
    return busy


def _ticks() -> tuple[int, int]:
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # less idle and waiting for a disk
