"""A worker: one process with the roles of a device, which answers the driver over a socket.

It listens before its roles are made, so that the driver waits in the socket's backlog meanwhile. Any number of calls
run at a time, on one event loop; one whose caller has gone runs to its end.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from harness.logs import log_as_lines
from harness.rpc.channel import Channel
from harness.rpc.children import end_with_peer
from harness.rpc.handshake import Role
from harness.rpc.listener import Listener
from harness.rpc.sockets import Framed
from harness.rpc.stream import Room, ServedStream
from harness.runtime import messages as m
from harness.runtime.runtime import Built, RoleName, WorkerDied, role_name

_PR_SET_NAME = 15
_CLOSED_S = 30.0  # that a worker without a driver has to close its roles

_log = logging.getLogger(__name__)


class WorkerServer:
    """Answers calls on the public coroutine methods of roles, once `roles` are there. Where making them fails, every
    call raises that error.

    listener: a socket that listens; token: what a client must prove that it has; on_left: called when the connection
    of one that did has ended.
    """

    def __init__(
        self, worker: str, listener: socket.socket, token: bytes, on_left: Callable[[], None] = lambda: None
    ) -> None:
        self.worker, self.on_left = worker, on_left
        self.listener = Listener(listener, {"admin": token}, self._admit)
        self.address = self.listener.address
        self.room = Room()
        self._roles: dict[str, object] = {}
        self._failure: m.Failure | None = None
        self._running: dict[str, set[asyncio.Task[Any]]] = {}
        self.clients: set[_Client] = set()
        self._ended: set[str] = set()
        self._stop = asyncio.Event()

    async def serve(self, build: Callable[[], Built | Coroutine[Any, Any, Built]]) -> None:
        """Serve until `stop`; then the roles are closed."""
        try:
            built = build()
            made = await built if isinstance(built, Coroutine) else built
            self._roles = {role_name(name): role for name, role in made.items()}
        except Exception as error:
            self._failure = m.failure_of(error, self.worker)
        self.listener.start()
        try:
            await self._stop.wait()
        finally:
            self.listener.close()
            for role in list(self._roles):
                with suppress(Exception):
                    await self.end(role)
            for client in list(self.clients):
                client.stream.finish()

    def stop(self) -> None:
        """Stop serving."""
        self._stop.set()

    def end_with_driver(self) -> None:
        """Have this process end with its driver, also where its event loop is stuck then."""
        end_with_peer(lambda: [client.stream for client in list(self.clients)], _CLOSED_S)

    def leave(self) -> None:
        """Stop serving, as no driver is there any more; the process has so long for it."""
        limit = threading.Timer(_CLOSED_S, os._exit, [1])
        limit.daemon = True
        limit.start()
        self.stop()

    def _admit(self, sock: socket.socket, channel: Channel, role: Role) -> None:
        self.clients.add(_Client(self, sock, channel))

    def left(self, client: _Client) -> None:
        """Note that a client has left."""
        self.clients.discard(client)
        if not self._stop.is_set():
            self.on_left()

    def version(self) -> int | None:
        """The newest that a role of it has."""
        versions = (getattr(role, "version", None) for role in self._roles.values())
        return max((version for version in versions if isinstance(version, int)), default=None)

    def find(self, request: m.Call) -> Callable[[], Coroutine[Any, Any, Any]]:
        """The call that a request asks for, with its arguments. Raises what refuses it."""
        self._check(request.role)
        role = self._roles[request.role]
        method = None if request.method.startswith("_") else getattr(role, request.method, None)
        if method is None or not inspect.iscoroutinefunction(method):
            raise AttributeError(f"{request.role} answers no call {request.method!r}")
        types = m.method_types(getattr(method, "__func__", method))
        try:
            positional, named = types.spread(m.decode(request.arguments, types.arguments))
        except ValueError as error:
            raise ValueError(f"{request.role} was asked to {request.method} with other arguments: {error}") from error
        return partial(method, *positional, **named)

    def track(self, task: asyncio.Task[Any], role: str) -> None:
        """A call on this role runs."""
        running = self._running.setdefault(role, set())
        running.add(task)
        task.add_done_callback(running.discard)

    def start_clock(self, origin: float) -> None:
        """Start the clocks of all roles that have one; those of one worker share it."""
        if self._failure is not None:
            raise m.error_of(self._failure)
        for role in self._roles.values():
            clock: Any = getattr(role, "clock", None)
            if clock is not None:
                clock.start(origin)

    def stop_clock(self) -> float:
        """The latest time of all roles that have a clock; 0 where none has."""
        if self._failure is not None:
            raise m.error_of(self._failure)
        clocks: list[Any] = [clock for role in self._roles.values() if (clock := getattr(role, "clock", None))]
        return max((clock.stop() for clock in clocks), default=0.0)

    async def end(self, role: str) -> None:
        """Cancel its calls, and close it."""
        self._check(role)
        ended = self._roles.pop(role)
        self._ended.add(role)
        calls = list(self._running.get(role, ()))
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        close: Any = getattr(ended, "close", None)
        if callable(close):
            closing = close()
            if inspect.isawaitable(closing):
                await closing

    def has_ended(self, role: str) -> bool:
        """Whether a role was ended."""
        return role in self._ended

    def _check(self, role: str) -> None:
        if self._failure is not None:
            raise m.error_of(self._failure)
        if role in self._ended:
            raise WorkerDied(f"{role} was ended before")
        if role not in self._roles:
            raise LookupError(f"{self.worker} has no role {role}; it has {', '.join(self._roles) or 'none'}")


class _Client:
    """Serves the calls of who has the token, until the connection ends."""

    def __init__(self, server: WorkerServer, sock: socket.socket, channel: Channel) -> None:
        self._server = server
        self.stream = ServedStream(
            sock,
            channel,
            self._serve,
            self._ended,
            name="the driver",
            refusal=lambda error: m.encode(m.Failed(m.failure_of(error))),
            room=server.room,
            limit=m.FRAME_LIMIT,
        )

    def _ended(self, error: Exception | None) -> None:
        self._server.left(self)

    def _serve(self, frame: Framed) -> None:
        try:
            match m.decode_request(frame.body):
                case m.Call() as call:
                    self._begin(frame.call, call.role, call.method, self._server.find(call))
                case m.EndRole(role=role):
                    self._begin(frame.call, "", f"the end of {role}", partial(self._server.end, role))
                case m.ReadClock():
                    self._send(frame.call, m.done(time.monotonic()))
                case m.StartClock(origin=origin):
                    self._server.start_clock(origin)
                    self._send(frame.call, m.done(None))
                case m.StopClock():
                    self._send(frame.call, m.done(self._server.stop_clock()))
                case m.Ping():
                    self._send(frame.call, m.done(os.getpid()))
        except Exception as error:  # the caller's, whatever it is
            self._fail(frame.call, error)

    def _begin(self, call: int, role: str, method: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._server.track(asyncio.create_task(self._finish(call, role, method, work)), role)

    async def _finish(self, call: int, role: str, method: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        where = f"{role}.{method}"
        try:
            answer = m.done(await work())
        except asyncio.CancelledError:
            ended = self._server.has_ended(role)
            reason = (
                WorkerDied(f"{role} was ended during {method}") if ended else RuntimeError(f"{where} was cancelled")
            )
            return self._fail(call, reason)
        except Exception as error:  # the caller's, whatever it is
            return self._fail(call, error, where)
        self._send(call, answer)

    def _fail(self, call: int, error: Exception, where: str | None = None) -> None:
        _log.debug("call %d failed", call, exc_info=error)
        self._send(call, m.Failed(m.failure_of(error, where)))

    def _send(self, call: int, answer: m.Message) -> None:
        body = m.encode(answer)
        if len(body) > m.FRAME_LIMIT:
            body = m.encode(m.Failed(m.failure_of(ValueError(f"an answer of {len(body)} bytes is too long to travel"))))
        self.stream.send(call, body)


def run_worker(worker: str, roles: Sequence[RoleName], build: bytes, token: bytes, descriptor: int) -> None:
    """The whole life of a worker's process. build: pickled, so that what cannot be loaded here is told the driver;
    descriptor: of the socket that listens."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, worker.encode())  # what `top` shows; its command line is the server's
    listener = socket.socket(fileno=descriptor)

    async def serve() -> None:
        server = WorkerServer(worker, listener, token, lambda: server.leave())
        log_as_lines(worker, server.version)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, server.stop)
        server.end_with_driver()
        await server.serve(lambda: pickle.loads(build)(roles))

    asyncio.run(serve())
