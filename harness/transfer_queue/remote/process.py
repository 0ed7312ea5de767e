"""A queue in a process of its own, which ends with the process that started it, however that ends."""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from harness.logs import RUN, log_as_lines
from harness.rpc.children import has_come
from harness.rpc.handshake import new_token
from harness.rpc.sockets import Address, forget_address, new_address
from harness.transfer_queue.control.spec import QueueSpec
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.server import QueueServer
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.storage.protocol import QueueBackend
from harness.transfer_queue.storage.shm import ShmBackend

_STOP_S = 10.0


class LaunchOptions(msgspec.Struct):
    """Options that the process reads from its standard input. backend: its class, as module:name, and its fields;
    resume, saves: folders, see `QueueServer`; run: for its log."""

    parent: int
    spec: QueueSpec
    token: bytes
    address: Address
    backend: str
    fields: dict[str, Any]
    resume: str | None
    saves: str | None
    run: str


@dataclass(slots=True)
class HostedQueue:
    """A queue that is stopped at the end of its context. `queue`: a client, picklable; `sync()`: one for a thread
    without an event loop."""

    queue: RemoteQueue

    def sync(self) -> SyncQueue:
        """A blocking client."""
        return SyncQueue(self.queue.endpoint)

    def stop(self) -> None:
        """End it and all it holds; every waiting call fails."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill its process, whatever it is doing; `stop` is still to be called."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()


@dataclass(slots=True)
class QueueProcess(HostedQueue):
    """A queue in a process of this machine."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls,
        spec: QueueSpec,
        backend: QueueBackend | None = None,
        *,
        address: Address | None = None,
        timeout_s: float = 60.0,
        call_timeout_s: float = 60.0,
        resume: str | None = None,
        saves: str | None = None,
        run: str = "",
    ) -> Self:
        """backend: a dataclass, shared memory of this node unless given; address: see `address`, an unnamed one unless
        given. resume: a folder with a saved queue to go on with; saves: one below which it may be saved; run: that its
        log names. TimeoutError if the process is not ready in time, ConnectionError if it ended."""
        backend = ShmBackend() if backend is None else backend
        kind = type(backend)
        options = LaunchOptions(
            os.getpid(),
            spec,
            new_token(),
            new_address() if address is None else address,
            f"{kind.__module__}:{kind.__qualname__}",
            msgspec.to_builtins(backend),
            resume,
            saves,
            run,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.transfer_queue.remote.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ),  # a copy: importing MLflow in a thread sets variables, which moves the process's own
            start_new_session=True,  # an interrupt from the keyboard is its parent's to deal with
        )
        try:
            listens_on = _ready(process, msgspec.msgpack.encode(options), timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            forget_address(options.address)
            raise
        return cls(RemoteQueue(Endpoint(listens_on, options.token, backend, spec, call_timeout_s)), process)

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        forget_address(self.queue.endpoint.address)


def _ready(process: subprocess.Popen[bytes], options: bytes, timeout_s: float) -> Address:
    """Write the options, and wait for the address that it listens on."""
    assert process.stdin is not None and process.stdout is not None
    until = time.monotonic() + timeout_s
    with process.stdin, process.stdout:
        with suppress(BrokenPipeError):  # it has ended, and its output says so, too
            process.stdin.write(options)
            process.stdin.close()
        said = b""
        while not said.endswith(b"\n"):
            if not has_come(process.stdout.fileno(), until - time.monotonic()):
                raise TimeoutError(f"the process of the transfer queue was not ready in {timeout_s} s")
            more = os.read(process.stdout.fileno(), 4096)
            if not more:
                code = process.wait()
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise ConnectionError(f"the process of the transfer queue {how} before it was ready")
            said += more
    return said.decode().strip()


def _backend(options: LaunchOptions) -> QueueBackend:
    module, _, name = options.backend.partition(":")
    return msgspec.convert(options.fields, getattr(importlib.import_module(module), name))


async def _serve(options: LaunchOptions) -> None:
    """Serve until the parent ends, or asks for the end."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    parent = os.pidfd_open(options.parent)
    loop.add_reader(parent, over.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    if os.getppid() != options.parent:  # it ended before it was watched
        return
    os.environ[RUN] = options.run
    log_as_lines("queue", lambda: None)
    server = QueueServer(
        options.spec,
        _backend(options),
        token=options.token,
        address=options.address,
        resume=options.resume,
        saves=options.saves,
    )
    async with server:
        print(server.address, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        await over.wait()
    loop.remove_reader(parent)


if __name__ == "__main__":
    try:
        launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LaunchOptions)
        asyncio.run(_serve(launch))
    except ProcessLookupError:
        sys.exit("the process that started this transfer queue has ended")
