"""Processes that begin with everything imported: one process imports, once, and forks them.

A fork is safe only while there is one thread and no CUDA context, so the server sees to that after its imports, and
from then on does nothing but fork, pass on signals and report deaths. Its processes end with the one that asked for
them, and with the server, however those end, and take with them what they started. Linux only.

Not multiprocessing's fork server: that has one environment and one server a process, waits for the imports at the first
start, and runs the caller's `__main__` once more in every child.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from harness.rpc.children import die_with_parent, has_come, kill_group

_END_S = 5.0
_MESSAGE = 64 << 10  # bytes; what is longer travels in files in memory
_DESCRIPTORS = 16


class _Fork(msgspec.Struct, tag=True):
    """Comes with descriptors: of the pickled work, of the pipe for reports, of the log if there is one, and those that
    the work is called with."""

    number: int
    logged: bool
    environment: dict[str, str]


class _Signal(msgspec.Struct, tag=True):
    number: int
    signal: int


class _Join(msgspec.Struct, tag=True):
    """Comes with the descriptor of a socket, over which another process asks."""


_decode = msgspec.msgpack.Decoder(_Fork | _Signal | _Join).decode


class ForkServer:
    """One process's connection to a server. The first one `launch`es it, and ends it; others `join`."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None, log: Path | None) -> None:
        self.log, self.has_forked = log, False
        self._socket, self._process = connection, process
        self._numbers = iter(range(1, sys.maxsize))

    @classmethod
    def launch(cls, preload: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> ForkServer:
        """Launch a server. preload: modules, or `module:function` to call after the import; environment: all of it;
        log: a file for what it says, by default where this process says it. Returns before anything is imported."""
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, nullcontext() if log is None else open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "harness.runtime.fork_server", str(theirs.fileno()), *preload],
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(connection, process, log)

    def share(self) -> socket.socket:
        """A connection for another process: pass it to that as a descriptor, and close it here."""
        theirs, servers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with servers:
            self._send(_Join(), [servers.fileno()])
        return theirs

    @classmethod
    def join(cls, descriptor: int) -> ForkServer:
        """Join by a descriptor that came from `share`."""
        return cls(socket.socket(fileno=descriptor), None, None)

    def start(
        self,
        work: Callable[..., Any],
        arguments: Sequence[Any],
        descriptors: Sequence[int] = (),
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> ForkedProcess:
        """work(*arguments, *descriptors) in a process of its own, as soon as everything is imported; returns at once.
        work and arguments are pickled, descriptors are passed; log: a file for its output."""
        number = next(self._numbers)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        passed = [os.memfd_create("work"), writer]
        try:
            with open(passed[0], "wb", closefd=False) as file:
                pickle.dump((work, tuple(arguments)), file)
            if log is not None:
                passed.append(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
            request = _Fork(number, log is not None, dict(environment or {}))
            self._send(request, [*passed, *descriptors])
        finally:
            for descriptor in passed:
                os.close(descriptor)
        return ForkedProcess(number, reader, self, log or self.log)

    @property
    def above(self) -> int:
        """The process that this one and all that is forked for it are below, or are: the server, if that forked this
        one, too."""
        return os.getppid() if self._process is None else os.getpid()

    def has_ended(self) -> bool:
        """Whether a server that this process launched has ended."""
        return self._process is not None and self._process.poll() is not None

    def signal(self, number: int, which: signal.Signals) -> None:
        """Send a signal to a process by its number."""
        with suppress(OSError):  # the server is gone, and so are its processes
            self._send(_Signal(number, which), [])

    def close(self) -> None:
        """End all that was forked for this process, and the server if this process launched it."""
        self._socket.close()
        if self._process is None:
            return
        if not self.has_forked:
            self._process.kill()  # it may import for seconds yet
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: _Fork | _Signal | _Join, descriptors: Sequence[int]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: then the pipe for reports ends, too
            socket.send_fds(self._socket, [msgspec.msgpack.encode(message)], list(descriptors))


@dataclass(eq=False)
class ForkedProcess:
    """A process that a server forked. log: where its output goes, if to a file."""

    number: int
    _reports: int
    _server: ForkServer
    log: Path | None
    pid: int | None = None
    """Once `wait` has read it."""
    code: int | None = None
    """Exit code as subprocess has it, once it has ended; None where the server ended before."""
    _status: str | None = None
    _text: bytes = b""
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, timeout_s: float) -> str | None:
        """How it ended; None if it has not within so many seconds."""
        until = time.monotonic() + timeout_s
        while self._status is None:
            if not has_come(self._reports, until - time.monotonic()):
                return None
            self._read()
        return self._status

    def has_begun(self) -> bool:
        """Whether the server has forked it: not as long as it imports."""
        self.wait(0.0)
        return self.pid is not None

    def signal(self, which: signal.Signals) -> None:
        """Send a signal; does nothing where the process has ended."""
        if self._status is None:
            self._server.signal(self.number, which)

    def close(self) -> None:
        """Give the process up."""
        with self._reading:
            self._status = self._status or "it was given up"
            os.close(self._reports)

    def _read(self) -> None:
        with self._reading:
            if self._status is not None or not has_come(self._reports, 0.0):
                return  # another thread has read it
            more = os.read(self._reports, 4096)
            self._text += more
            lines = self._text.decode().splitlines()
            if lines and lines[0].isdigit():
                self.pid, self._server.has_forked = int(lines[0]), True
            if len(lines) > 1 and self._text.endswith(b"\n"):
                self.code = os.waitstatus_to_exitcode(int(lines[1]))
                self._status = _description(self.code)
            elif not more:
                self._status = "the server that forks it has ended" + self._last_words()

    def _last_words(self) -> str:
        if self._server.log is None:
            return ""
        lines = self._server.log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def _description(code: int) -> str:
    return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"


# -- the server


@dataclass(eq=False)
class _Child:
    pid: int
    pidfd: int
    number: int
    reports: int


@dataclass(eq=False)
class _Client:
    """A client. children: by the numbers that it gave them."""

    socket: socket.socket
    children: dict[int, _Child] = field(default_factory=dict)


class _Server:
    def __init__(self, first: socket.socket) -> None:
        self._selector = selectors.PollSelector()
        self._clients: list[_Client] = []
        self._admit(first)

    def run(self) -> None:
        """Serve until the first client has ended."""
        first = self._clients[0]
        try:
            while first in self._clients:
                for key, _ in self._selector.select():
                    client, child = key.data
                    if child is not None:
                        self._bury(client, child)
                    elif client in self._clients:
                        self._take(client)
        finally:
            for client in self._clients:
                _kill_all(client)

    def _admit(self, connection: socket.socket) -> None:
        client = _Client(connection)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, (client, None))

    def _take(self, client: _Client) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(client.socket, _MESSAGE, _DESCRIPTORS)
        except ConnectionError:
            data = b""
        if not data:
            self._clients.remove(client)
            self._selector.unregister(client.socket)
            client.socket.close()
            _kill_all(client)
            return
        match _decode(data):
            case _Fork() as request:
                self._fork(client, request, descriptors)
            case _Signal(number=number, signal=which) if number in client.children:
                os.kill(client.children[number].pid, which)
            case _Join():
                self._admit(socket.socket(fileno=descriptors[0]))

    def _fork(self, client: _Client, request: _Fork, descriptors: Sequence[int]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            children = [child for client in self._clients for child in client.children.values()]
            own = [client.socket.fileno() for client in self._clients]
            own += [descriptor for child in children for descriptor in (child.pidfd, child.reports)]
            _become(request, descriptors, server, own)
        work, reports, *passed = descriptors
        for descriptor in (work, *passed):
            os.close(descriptor)
        child = _Child(pid, os.pidfd_open(pid), request.number, reports)
        client.children[child.number] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, (client, child))
        _write(reports, f"{pid}\n")

    def _bury(self, client: _Client, child: _Child) -> None:
        """End a child with what it had started: its group is there until its end has been taken note of."""
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
        _kill_group(child.pid)
        _, status = os.waitpid(child.pid, 0)
        _write(child.reports, f"{status}\n")
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        os.close(child.reports)
        del client.children[child.number]


def _write(descriptor: int, text: str) -> None:
    with suppress(BrokenPipeError):
        os.write(descriptor, text.encode())


def _kill_all(client: _Client) -> None:
    for child in client.children.values():
        _kill_group(child.pid)


def _kill_group(pid: int) -> None:
    """Kill the group of a process; or it alone where it has not made that yet."""
    kill_group(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _become(request: _Fork, descriptors: Sequence[int], server: int, inherited: Iterable[int]) -> NoReturn:
    """Become what was asked for, in the forked process."""
    code = 1
    try:
        os.setsid()  # an interrupt from the keyboard is for the driver
        die_with_parent()
        if os.getppid() != server:  # it has ended in between
            os._exit(1)
        work, reports, *passed = descriptors
        for descriptor in (*inherited, reports):
            os.close(descriptor)
        if request.logged:
            log = passed.pop(0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed process flushes nothing
        tell_deaths()
        os.environ.update(request.environment)
        _reseed()
        with open(work, "rb") as file:
            file.seek(0)
            called, arguments = pickle.load(file)
        called(*arguments, *passed)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def tell_deaths() -> None:
    """Let a process that a fault or abort() ends write where it was to its standard error: Python's frames, and before
    them the native ones of all threads, where torch is. Gloo's own thread ends its process so, and so does C++ wherever
    nobody catches."""
    faulthandler.enable()
    if "torch" in sys.modules:
        sys.modules["torch"]._C._set_print_stack_traces_on_fatal_signal(True)


def _reseed() -> None:
    """Seed anew what draws without a seed of its own, which must not draw the same in every process. Python's own sees
    to it itself."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def check_forkable() -> None:
    """Raises RuntimeError where a fork of this process is not safe."""
    tasks = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len(tasks) > 1:
        raise RuntimeError(f"a fork is not safe, for what was imported runs threads: {', '.join(tasks)}")
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith("/dev/nvidia-uvm"):
                raise RuntimeError("a fork is not safe: what was imported has initialised CUDA")


def _main(descriptor: int, preload: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in preload:
        module, _, function = name.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    check_forkable()
    gc.collect()
    gc.freeze()  # collections in the children leave shared pages alone
    _Server(socket.socket(fileno=descriptor)).run()


if __name__ == "__main__":
    # As the module of its name: what is pickled is found there.
    importlib.import_module("harness.runtime.fork_server")._main(int(sys.argv[1]), sys.argv[2:])
