"""One run in a process of its own: started, waited for, ended with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from harness.rpc.children import die_with_parent, kill_group
from harness.rpc.process_id import ProcessId, descendants, left_after
from harness.runtime.fork_server import ForkServer

END_S = 60.0
"""Longest wait for an interrupted run to put its processes away; a run takes some seconds for it. Then it is killed."""

KILL_S = 20.0  # longest wait for processes that were killed to be gone
_TAIL = 12  # lines of a log that are shown of a run that failed


class RunProcess:
    """A run with a log, in a session of its own, so that only `end` passes Ctrl-C on. what: how errors name it."""

    def __init__(self, what: str, log: Path, process: _Process) -> None:
        self.what, self.log, self.began = what, log, time.monotonic()
        self._process = process

    @classmethod
    def spawn(cls, what: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> RunProcess:
        """A command. Where this process is killed it is interrupted. environment: on top of this process's own."""
        return cls(what, log, _Spawned(command, _emptied(log), environment))

    @classmethod
    def fork(
        cls, what: str, server: ForkServer, work: Callable[..., Any], arguments: Sequence[Any], log: Path
    ) -> RunProcess:
        """work(*arguments, descriptor), forked by the server, which the descriptor lets it join. It ends with this
        process and with the server, and what the server forks for it ends with it."""
        return cls(what, log, _Forked(server, work, arguments, _emptied(log)))

    @property
    def pid(self) -> int | None:
        """None where it has not begun yet."""
        return self._process.pid

    @property
    def seconds(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.began

    def ended(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.code(0.0)

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return "\n".join(lines[-_TAIL:])

    def end(self) -> None:
        """Interrupt it, and kill what of it is left after END_S, with all that it started. Raises TimeoutError, naming
        it, where a killed process does not go."""
        if self.ended() is not None:
            return
        if self._process.pid is None:  # nor will it do anything
            self._process.kill_group()
            return
        family = descendants(self._process.pid)
        try:
            self._process.interrupt()
            self._process.code(END_S)
        finally:
            self._kill(family)

    def clear(self) -> None:
        """Kill what it left running in its process group."""
        self._process.kill_group()

    def _kill(self, family: Sequence[ProcessId]) -> None:
        self.clear()
        for process in family:
            process.kill()
        named = [process.number for process in left_after(KILL_S, family)]
        if self._process.code(KILL_S) is None:
            named.append(self._process.pid or 0)
        if named:
            processes = ", ".join(map(str, sorted(named)))
            raise TimeoutError(f"waited {KILL_S:g} s for processes {processes} of {self.what} to go after SIGKILL")


class _Process(Protocol):
    @property
    def pid(self) -> int | None:
        """None where it has not begun yet."""

    def code(self, within_s: float) -> int | None:
        """Exit code, once it has ended; None where it has not within so many seconds."""

    def interrupt(self) -> None: ...

    def kill_group(self) -> None:
        """Itself, and what it left running in its process group."""


class _Spawned:
    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGINT),
            )
        self.pid = self._process.pid

    def code(self, within_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(within_s)
        return None

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill_group(self) -> None:
        kill_group(self.pid)


class _Forked:
    """A process of a fork server, which kills its group as it ends."""

    def __init__(self, server: ForkServer, work: Callable[..., Any], arguments: Sequence[Any], log: Path) -> None:
        with server.share() as shared:
            self._process = server.start(work, arguments, [shared.fileno()], log=log)
        self._log = log
        self._code: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def code(self, within_s: float) -> int | None:
        if self._code is None and (how := self._process.wait(within_s)) is not None:
            self._code = self._process.code
            if self._code is None:
                self._code = 1
                with self._log.open("a") as output:
                    output.write(f"{how}\n")
            self._process.close()
        return self._code

    def interrupt(self) -> None:
        self._process.signal(signal.SIGINT)

    def kill_group(self) -> None:
        self._process.signal(signal.SIGKILL)


def _emptied(log: Path) -> Path:
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    return log
