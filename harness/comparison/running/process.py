"""One run in a process of its own: started, waited for, ended with everything that it started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

END_S = 60.0
"""Longest wait for an interrupted run to put its processes away; a run takes some seconds for it. Then it is killed."""

KILL_S = 20.0
"""Longest wait for processes that were killed to be gone."""

_TAIL = 12  # lines of a log that are shown of a run that failed
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class RunProcess:
    """A command whose output goes to a log. It is a session of its own, so that Ctrl-C reaches it through `end` only,
    and where this process is killed it is interrupted."""

    def __init__(self, what: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """what: how errors name it. environment: on top of this process's own."""
        self.what, self.log = what, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_interrupted_with_parent,
            )

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return "\n".join(lines[-_TAIL:])

    def end(self) -> None:
        """Interrupt it, and kill what of it is left after END_S, with all that it started. Raises TimeoutError, naming
        it, where a killed process does not go."""
        if self._process.poll() is not None:
            return
        family = psutil.Process(self._process.pid).children(recursive=True)  # Ray's daemons leave the process group
        try:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass  # then it is killed
        finally:
            self._kill(family)

    def clear(self) -> None:
        """Kill what it left running in its process group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of them have gone by themselves

    def _kill(self, family: Sequence[psutil.Process]) -> None:
        self.clear()
        left = [process for process in family if process.is_running()]
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, left = psutil.wait_procs(left, timeout=KILL_S)
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            left = [psutil.Process(self._process.pid), *left]
        if left:
            named = ", ".join(str(process.pid) for process in left)
            raise TimeoutError(f"waited {KILL_S:g} s for processes {named} of {self.what} to go after SIGKILL")


def _interrupted_with_parent() -> None:
    """However this process ends, the run does not go on alone; on Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
