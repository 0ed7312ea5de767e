"""The driver's side of a worker: one connection for all of its roles, and a typed proxy for each.

A call whose caller gives up goes on there; its answer is dropped.
"""

from __future__ import annotations

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import wraps
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from harness.rpc.channel import Channel
from harness.rpc.handshake import greet
from harness.rpc.sockets import Address, Framed, allow_many_files, connected
from harness.rpc.stream import FramedStream, PendingCalls
from harness.runtime import messages as m
from harness.runtime.runtime import Build, Handle, RealClock, RoleName, WorkerDied, retrieved, role_name
from harness.transfer_queue.remote.process import HostedQueue

R_co = TypeVar("R_co", covariant=True)

_REASON_S = 5.0  # how long the cause of a death may take to be known, after its connection has ended
_CLOCK_READINGS = 5  # of which the fastest counts


class WorkerProcess(Protocol):
    """The process of a worker, as a runtime knows it."""

    async def address(self) -> Address:
        """The address where it listens. Raises WorkerDied where it never will."""

    async def death(self, within_s: float) -> str | None:
        """How it died, as soon as that is known; None while it lives."""

    def kill(self) -> None:
        """Kill it at once, whatever it does. Nothing happens where it is dead."""


class ConnectionEnded(ConnectionError):
    """The worker is gone; the message says how it died."""


class WorkerConnection:
    """A connection to one worker, opened by its first call, for one event loop. start_timeout_s: the longest wait for
    its roles to be made; here: it is on this host, where the end of a process ends its connection."""

    def __init__(
        self,
        worker: str,
        process: WorkerProcess,
        token: bytes,
        *,
        roles: Iterable[str],
        start_timeout_s: float,
        here: bool = True,
    ) -> None:
        self.worker, self.process, self.token, self.here = worker, process, token, here
        self.roles = set(roles)
        """Roles that have not been ended."""
        self.start_timeout_s = start_timeout_s
        self.ended: str | None = None
        self._opening: asyncio.Future[_Stream] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def ask(self, request: m.Message) -> msgspec.Raw:
        """The answer, encoded. Raises what the call raised there, ConnectionEnded where the worker ends before."""
        if self.ended is not None:
            raise ConnectionEnded(self.ended)
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(retrieved)
        stream = self._opening.result() if self._opening.done() else await asyncio.shield(self._opening)
        return await stream.ask(request)

    async def connected(self) -> int:
        """Wait until its roles are there, or could not be made: then calls say why. The process's id."""
        return m.decode(await self.ask(m.Ping()), int)

    async def start_clock(self, origin: float) -> float:
        """Time 0 of its roles, a reading of time.monotonic in this process; all processes of a host read the same.
        Seconds by which its times may be off; nothing happens where it is dead: what it was for says so."""
        error = 0.0
        with suppress(ConnectionEnded):
            ahead, error = (0.0, 0.0) if self.here else await self._clock_ahead()
            await self.ask(m.StartClock(origin + ahead))
        return error

    async def stop_clock(self) -> float:
        """The time at which its roles' clocks stand still from now on; 0 where it is dead."""
        with suppress(ConnectionEnded):
            return m.decode(await self.ask(m.StopClock()), float)
        return 0.0

    async def _clock_ahead(self) -> tuple[float, float]:
        """Seconds that its host's clock is ahead, and by which that is off at most: half of the shortest round trip."""
        readings = []
        for _ in range(_CLOCK_READINGS):
            asked = time.monotonic()
            there = m.decode(await self.ask(m.ReadClock()), float)
            answered = time.monotonic()
            readings.append((answered - asked, there - (asked + answered) / 2))
        took, ahead = min(readings)
        return ahead, took / 2

    async def death(self, within_s: float) -> str | None:
        """How the process ended; None while it is there. One that does not answer `within_s` is alive."""
        try:
            async with asyncio.timeout(within_s):
                await self.ask(m.Ping())
        except ConnectionEnded as end:
            return str(end)
        except (TimeoutError, ConnectionError):
            pass
        return None

    @property
    def is_open(self) -> bool:
        """Whether it has answered, and has not ended."""
        opened = self._opening
        return self.ended is None and opened is not None and opened.done() and opened.exception() is None

    def give_up(self, why: str) -> None:
        """Give up a worker that does not answer: its process is killed, and every call ends for this reason."""
        if self.is_open and self._opening is not None:
            self.ended = why
            self.process.kill()
            self._opening.result().end(why)

    async def kill(self, within_s: float | None) -> None:
        """Kill the worker; returns when the process is gone. Raises TimeoutError."""
        self.process.kill()
        if await self.process.death(float("inf") if within_s is None else within_s) is None:
            raise TimeoutError(f"{self.worker} was killed and is still there after {within_s} s")
        self.ended = self.ended or "it was ended"

    async def _open(self) -> _Stream:
        try:
            async with asyncio.timeout(self.start_timeout_s):
                address = await self.process.address()
                sock = await connected(address)
                _keep_alive(sock)
                try:
                    channel = await greet(sock, self.token, self.worker, address)
                except BaseException:
                    sock.close()
                    raise
                stream = _Stream(self, sock, channel)
                if not self.here:
                    self._watching = asyncio.create_task(self._watch(stream))
                return stream
        except TimeoutError as error:
            raise TimeoutError(f"{self.worker} was not ready within {self.start_timeout_s} s") from error
        except OSError as error:
            if isinstance(error, ConnectionEnded | PermissionError):
                raise
            raise ConnectionEnded(await self.reason(f"no connection to it: {error}")) from error

    async def _watch(self, stream: _Stream) -> None:
        """A host that is gone ends no connection: who started the process knows first that it died."""
        stream.end(await self.process.death(float("inf")) or "it has ended")

    async def reason(self, otherwise: str) -> str:
        """How it died."""
        self.ended = await self.process.death(_REASON_S) or otherwise
        return self.ended


class _Stream:
    """Calls over an open connection; once that ends, they fail with how the worker died."""

    def __init__(self, connection: WorkerConnection, sock: socket.socket, channel: Channel) -> None:
        self._connection = connection
        self._stream = FramedStream(sock, channel, self._take, self._ended, limit=m.FRAME_LIMIT, descriptors=0)
        self._calls = PendingCalls(self._stream)
        self._failing: asyncio.Task[None] | None = None

    async def ask(self, request: m.Message) -> msgspec.Raw:
        if self._connection.ended is not None:
            raise ConnectionEnded(self._connection.ended)
        body = m.encode(request)
        if len(body) > m.FRAME_LIMIT:
            raise ValueError(f"a call with {len(body)} bytes of arguments is too long to travel")
        frame = await self._calls.ask(body)
        try:
            answer = m.decode_answer(frame.body)
        except msgspec.MsgspecError as error:
            why = f"it answered with what is no message: {error}"
            self.end(why)
            raise ConnectionEnded(why) from error
        if isinstance(answer, m.Failed):
            raise m.error_of(answer.failure)
        return answer.value

    def _take(self, frame: Framed) -> None:
        self._calls.take(frame)  # but where who asked has given up

    def end(self, reason: str) -> None:
        """No answer comes any more."""
        self._connection.ended = self._connection.ended or reason
        self._stream.close()

    def _ended(self, error: Exception | None) -> None:
        self._failing = asyncio.get_running_loop().create_task(self._fail())

    async def _fail(self) -> None:
        """The reason is asked of the process, where none is known."""
        connection = self._connection
        how = connection.ended = connection.ended or await connection.reason("its connection ended")
        self._calls.fail(ConnectionEnded, how)


class RemoteRole(Generic[R_co]):
    """A handle on a role in a worker. `role` has the coroutine methods of its class, called there; call_timeout_s: the
    longest wait for an answer, but to calls that are `open_ended`; None as long as the worker lives."""

    def __init__(
        self, name: str, role_class: type[R_co], connection: WorkerConnection, call_timeout_s: float | None
    ) -> None:
        self.name, self.connection, self._timeout_s = name, connection, call_timeout_s
        self._proxy: Any = _Proxy(name, role_class, self.call)

    @property
    def role(self) -> R_co:
        """A proxy of the role, whose methods raise what they raise there; WorkerDied where it ends without an answer,
        TimeoutError where it does not answer in time."""
        return self._proxy

    async def call(self, method: str, types: m.MethodTypes, arguments: tuple[Any, ...], open_ended: bool) -> Any:
        """Call a method of the role over the connection."""
        request = m.Call(self.name, method, msgspec.Raw(m.encode(arguments)))
        waiting = asyncio.timeout(None if open_ended else self._timeout_s)
        try:
            async with waiting:
                answer = await self.connection.ask(request)
        except ConnectionEnded as error:
            raise WorkerDied(f"{self.name} died during {method}: {error}") from error
        except TimeoutError as error:
            if not waiting.expired():
                raise
            raise TimeoutError(f"{self.name} did not answer {method} within {self._timeout_s} s") from error
        try:
            return m.decode(answer, types.answer)
        except ValueError as error:
            raise TypeError(f"{self.name} did not answer {method} with {types.answer}: {error}") from error

    async def connected(self) -> int:
        """Wait until the worker has made its roles."""
        return await self.connection.connected()

    async def death(self, within_s: float = 5.0) -> str | None:
        """How it was ended, or its process; None while it is there. One that is busy for `within_s` counts as alive."""
        return await self.connection.death(within_s) if self.name in self.connection.roles else "it was ended"

    async def end(self) -> None:
        """End the worker, whatever it is doing; where it has other roles, this one only, as soon as it is free to."""
        connection = self.connection
        connection.roles.discard(self.name)
        if not connection.roles:
            await connection.kill(self._timeout_s)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.ask(m.EndRole(self.name))
        except (ConnectionEnded, WorkerDied):
            pass  # it is dead, or ended
        except TimeoutError as error:
            raise TimeoutError(f"{self.name} was ended and is still there after {self._timeout_s} s") from error


class _Proxy:
    """A stand-in for a role: an attribute is a coroutine function that asks for the call."""

    def __init__(
        self, name: str, role_class: type, call: Callable[[str, m.MethodTypes, tuple[Any, ...], bool], Any]
    ) -> None:
        self._name, self._class, self._call = name, role_class, call

    def __getattr__(self, method: str) -> Any:
        function = None if method.startswith("_") else getattr(self._class, method, None)
        if not callable(function):
            raise AttributeError(f"{self._name} answers no call {method!r}: {self._class.__name__} has no such method")
        types, call = m.method_types(function), self._call
        open_ended: bool = getattr(function, "open_ended", False)

        @wraps(function)
        async def ask(*arguments: Any, **named: Any) -> Any:
            return await call(method, types, types.bind(arguments, named), open_ended)

        self.__dict__[method] = ask
        return ask

    def __repr__(self) -> str:
        return f"<{self._class.__name__} {self._name} in its worker>"


class ConnectedRuntime(ABC):
    """The base of runtimes whose workers and queue are other processes. start_timeout_s, call_timeout_s: the longest
    wait for the roles of a worker to be made, and for an answer. here: all are on this host."""

    _queue: HostedQueue

    def __init__(self, *, start_timeout_s: float, call_timeout_s: float | None, here: bool) -> None:
        allow_many_files()
        self.start_timeout_s, self.call_timeout_s, self.here = start_timeout_s, call_timeout_s, here
        self._connections: dict[str, WorkerConnection] = {}
        self._handles: dict[str, list[RemoteRole[Any]]] = {}
        self._starts: dict[str, tuple[Sequence[int], Sequence[RoleName], Build]] = {}
        self._clock: RealClock | None = None  # of the run, once it was started
        self._stack = ExitStack()

    @abstractmethod
    def _launch(self, name: str) -> tuple[WorkerProcess, bytes]:
        """Another process of this worker, as it is in `_starts`, and the token for it."""

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def kill_queue(self) -> None:
        """Kill the queue's process, whatever it is doing."""
        self._queue.kill()

    def start_worker(
        self, name: str, devices: Sequence[int], roles: Mapping[RoleName, type], build: Build
    ) -> list[RemoteRole[Any]]:
        """Start a worker on these devices, in which `build(names of the roles)` makes its roles; returns at once.
        roles: with the class whose methods a handle has."""
        self._starts[name] = devices, list(roles), build
        named = {role_name(role): role_class for role, role_class in roles.items()}
        connection = self._connection(name, named)
        self._handles[name] = [
            RemoteRole(role, role_class, connection, self.call_timeout_s) for role, role_class in named.items()
        ]
        return list(self._handles[name])

    async def start_again(self, handle: Handle[Any]) -> None:
        """Start a role again, as `harness.runtime.runtime.Runtime` says: all handles of its worker are on the new one
        from now on."""
        assert isinstance(handle, RemoteRole), "it is of this runtime"
        worker = handle.connection.worker
        await handle.connection.kill(self.call_timeout_s)
        handles = self._handles[worker]
        connection = self._connection(worker, [one.name for one in handles])
        for one in handles:
            one.connection = connection
        try:
            for one in handles:
                await one.role.waiting()
        except TimeoutError as error:  # where it was is no room for it, as while its host is away
            raise WorkerDied(str(error)) from error
        if self._clock is not None:
            await self._start_clock(connection, self._clock)

    def _connection(self, worker: str, roles: Iterable[str]) -> WorkerConnection:
        process, token = self._launch(worker)
        connection = WorkerConnection(
            worker, process, token, roles=roles, start_timeout_s=self.start_timeout_s, here=self.here
        )
        self._connections[worker] = connection
        return connection

    def _stopped(self) -> None:
        """Note that they are about to be stopped by this process: how one ended is asked of nobody from now on, least
        of all of an event loop that is itself at its end."""
        for connection in self._connections.values():
            connection.ended = connection.ended or "it was stopped"

    async def stop_clocks(self) -> float:
        """Stop the clock of every worker that lives; returns the latest of their times."""
        return max(await asyncio.gather(*(connection.stop_clock() for connection in self._connections.values())))

    async def start_clocks(self, clock: RealClock) -> None:
        """Have every worker that lives, and those that are started later, count the time of this clock."""
        self._clock = clock
        async with asyncio.TaskGroup() as tasks:
            for connection in self._connections.values():
                tasks.create_task(self._start_clock(connection, clock))

    async def _start_clock(self, connection: WorkerConnection, clock: RealClock) -> None:
        clock.uncertainty_s = max(clock.uncertainty_s, await connection.start_clock(clock.origin))


def _keep_alive(sock: socket.socket) -> None:
    """A machine that is gone ends no connection: TCP has to find out, within a minute."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
