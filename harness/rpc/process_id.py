"""Processes of this machine, and what they started, as Linux lists it."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOKED_EVERY_S = 0.02


@dataclass(frozen=True)
class ProcessId:
    """A process of this machine. started: in ticks since it booted, by which it differs from a later one of its
    number."""

    number: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it has not ended; one whose parent has not asked how it did has."""
        found = _listed(self.number)
        return found is not None and found[0] == self and not found[2]

    @property
    def reaped(self) -> bool:
        """Whether it has ended, and its parent has asked how, if it is not of this process: that does so here."""
        with suppress(ChildProcessError):  # no child, or one that somebody has waited for
            os.waitpid(self.number, os.WNOHANG)
        found = _listed(self.number)
        return found is None or found[0] != self

    def kill(self) -> None:
        """Kill it, where it is alive."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.number, signal.SIGKILL)


def process_id(number: int) -> ProcessId:
    """The process that has this number now. Raises ProcessLookupError where none has."""
    found = _listed(number)
    if found is None:
        raise ProcessLookupError(f"no process has the number {number}")
    return found[0]


def descendants(number: int) -> list[ProcessId]:
    """All that this process started, and what they did, parents first; those whose parent is gone are not found."""
    below: dict[int, list[ProcessId]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := _listed(int(entry))) is not None:
            below.setdefault(found[1], []).append(found[0])
    every = list(below.get(number, ()))
    for one in every:
        every += below.get(one.number, ())
    return every


def _listed(number: int) -> tuple[ProcessId, int, bool] | None:
    """The process, its parent's number, and whether it has ended, by proc_pid_stat(5); None where it is gone."""
    try:
        after_name = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = after_name.split()
    return ProcessId(number, int(fields[19])), int(fields[1]), fields[0] in "ZX"


def left_after(seconds: float, processes: Sequence[ProcessId]) -> list[ProcessId]:
    """Wait so long for these to end, and for their parents, or who inherited them, to ask how; what is left."""
    until = time.monotonic() + seconds
    while (left := [process for process in processes if not process.reaped]) and time.monotonic() < until:
        time.sleep(_LOOKED_EVERY_S)
    return left


def end_within(seconds: float, processes: Sequence[ProcessId]) -> None:
    """Wait so long for these to end; kill what is left, and wait for that as long."""
    left = left_after(seconds, processes)
    for process in left:
        process.kill()
    left_after(seconds, left)
