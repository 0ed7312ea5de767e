"""The queue in any process with an event loop: a TransferQueue over a socket."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from harness.rpc.handshake import Role, greet, token_for
from harness.rpc.sockets import (
    ClientSocket,
    Framer,
    Outbox,
    Splitter,
    WireError,
    abandon_in_children,
    check_peer,
    client_socket,
    close_all,
    receive,
    send_at_once,
)
from harness.transfer_queue.queue import Portal
from harness.transfer_queue.remote import calls
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.storage.protocol import Session, Storage


class Connection:
    """Carries out calls, any number at a time. Once it has failed, every call says so: what became of the queue is not
    to be guessed."""

    storage: Storage

    def __init__(self, endpoint: calls.Endpoint, sock: ClientSocket) -> None:
        self._endpoint = endpoint
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._framer, self._splitter = Framer(), Splitter()
        self._outbox = Outbox(sock)
        self._corked = bytearray()
        self._waiting: dict[int, asyncio.Future[calls.Response]] = {}
        self._calls = 0
        self.ended: str | None = None
        self.inherited = False
        self._until_loop_ends = self._guard()

    @classmethod
    async def open(cls, endpoint: calls.Endpoint) -> Connection:
        """PermissionError without the right token, ConnectionError where no queue listens."""
        sock, place = client_socket(endpoint.address)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(endpoint.call_timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, place)
            check_peer(sock)
        except PermissionError:
            sock.close()
            raise
        except (OSError, TimeoutError) as error:
            sock.close()
            raise ConnectionError(f"no transfer queue listens on {endpoint.address}: {error}") from None
        send_at_once(sock)
        connection = cls(endpoint, sock)
        abandon_in_children(connection)
        try:
            await connection._greet()
        except BaseException:
            connection.end("the transfer queue did not let this client in")
            raise
        return connection

    async def _greet(self) -> None:
        await anext(self._until_loop_ends)
        endpoint = self._endpoint
        try:
            async with asyncio.timeout(endpoint.call_timeout_s):
                self._channel = await greet(self._sock, endpoint.token, "the transfer queue", endpoint.address)
        except TimeoutError:
            raise TimeoutError(self._waited("its greeting")) from None
        except PermissionError:
            raise
        except OSError as error:
            self._lost(error)
            raise ConnectionError(self.ended) from None
        self._loop.add_reader(self._sock.fileno(), self._readable)
        answer, _ = await self._reply(0, "its greeting", endpoint.call_timeout_s)
        if not isinstance(answer, m.Welcome):
            raise ConnectionError(f"what listens on {endpoint.address} is no transfer queue")
        self.storage = endpoint.backend.storage(Session(answer.queue, answer.writer))

    async def _guard(self) -> AsyncGenerator[None, None]:
        """An event loop that shuts down ends its generators, and with this one the connection."""
        try:
            yield
        finally:
            self.end("its event loop was shut down")

    async def run(self, call: calls.Call) -> Any:
        """The call's result; raises what it raises."""
        try:
            step = next(call)
            while True:
                try:
                    result = await self._carry_out(step)
                except BaseException as error:
                    step = call.throw(error)
                else:
                    step = call.send(result)
        except StopIteration as end:
            return end.value

    async def _carry_out(self, step: calls.Step) -> Any:
        if isinstance(step, calls.Request):
            return await self._request(step)
        if isinstance(step, calls.Notify):
            return self._notify(step.message)
        if self.storage.waits:
            return await asyncio.to_thread(step.work, self.storage)
        return step.work(self.storage)

    async def _request(self, step: calls.Request) -> calls.Response:
        if self.ended is not None:
            raise ConnectionError(self.ended)
        self._calls += 1
        call = self._calls
        data = self._framer.frame(call, m.encode(step.message), step.descriptors)
        if self._corked:
            data = bytes(self._corked) + data
            self._corked.clear()
        self._send(data, step.descriptors)
        return await self._reply(call, step.message, None if step.waits else self._endpoint.call_timeout_s)

    async def _reply(self, call: int, request: m.Message | str, timeout_s: float | None) -> calls.Response:
        if self.ended is not None:
            raise ConnectionError(self.ended)
        answer: asyncio.Future[calls.Response] = self._loop.create_future()
        self._waiting[call] = answer
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self._late, call, request)
        try:
            return await answer
        except BaseException:
            self._withdraw(call, answer)
            raise
        finally:
            self._waiting.pop(call, None)
            if timer is not None:
                timer.cancel()

    def _late(self, call: int, request: m.Message | str) -> None:
        answer = self._waiting[call]
        if not answer.done():
            what = request if isinstance(request, str) else calls.describe(request)
            answer.set_exception(TimeoutError(self._waited(what)))

    def _waited(self, what: str) -> str:
        endpoint = self._endpoint
        return f"the transfer queue on {endpoint.address} did not answer {what} within {endpoint.call_timeout_s} s"

    def _withdraw(self, call: int, answer: asyncio.Future[calls.Response]) -> None:
        """The caller has gone: what it was to get, here already or on its way, goes back."""
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            close_all(answer.result()[1])
        if self.ended is None:
            self._notify(m.Withdraw(call))

    def _notify(self, request: m.Message) -> None:
        """With what is sent next in this turn of the event loop, or at its end."""
        if self.ended is not None:
            return
        if not self._corked:
            self._loop.call_soon(self._uncork)
        self._calls += 1
        self._corked += self._framer.frame(self._calls, m.encode(request))

    def _uncork(self) -> None:
        if self._corked and self.ended is None:
            data = bytes(self._corked)
            self._corked.clear()
            self._send(data)

    def _send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            self._outbox.send(self._channel.seal(data), descriptors)
        except OSError as error:
            self._lost(error)
        if self._outbox:
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            if self._outbox.flush():
                self._loop.remove_writer(self._sock.fileno())
        except OSError as error:
            self._lost(error)

    def _readable(self) -> None:
        try:
            data, descriptors = receive(self._sock)
            frames = self._splitter.feed(self._channel.unseal(data), descriptors)
        except BlockingIOError:
            return
        except OSError as error:
            return self._lost(error)
        if not data:
            return self._lost(None)
        for frame in frames:
            try:
                self._answered(frame.call, m.decode_answer(frame.body), frame.descriptors)
            except msgspec.MsgspecError as error:
                close_all(frame.descriptors)
                self.end(f"the transfer queue on {self._endpoint.address} sent what is no answer: {error}")

    def _answered(self, call: int, answer: m.AnyResponse, descriptors: list[int]) -> None:
        waiting = self._waiting.get(call)
        if waiting is not None and not waiting.done():
            waiting.set_result((answer, descriptors))
            return
        close_all(descriptors)
        if call == 0 and isinstance(answer, m.Failed):
            self.end(f"the transfer queue on {self._endpoint.address} ended the connection: {answer.text}")
        elif call == 0:
            calls.handle_notice(self.storage, answer)

    def _lost(self, error: Exception | None) -> None:
        why = "its process has ended" if error is None else str(error)
        self.end(f"the connection to the transfer queue on {self._endpoint.address} is lost: {why}")

    def end(self, why: str) -> None:
        """Every call fails with this reason, those that wait too."""
        if self.ended is not None:
            return
        self.ended = why
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError(why))
        self._let_go()

    def abandon(self) -> None:
        """See `sockets.Inherited`."""
        self.inherited = True
        self.ended = "this process was forked from the one that was connected"
        self._let_go()

    def _let_go(self) -> None:
        self._sock.close()
        self._outbox.close()
        try:
            self._splitter.close()
        except WireError:
            pass  # the end has its reason already
        if hasattr(self, "storage"):
            self.storage.close()


_connections: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str, bytes], asyncio.Task[Connection]]
] = weakref.WeakKeyDictionary()
"""One connection for each event loop and queue: its address and token."""


@dataclass(frozen=True, slots=True)
class RemoteQueue(calls.Verbs):
    """A TransferQueue client; picklable, with its token.

    Connects with its first call, once for all in the same event loop, and never again there: after a failure every call
    raises ConnectionError. A call that the server does not answer in `endpoint.call_timeout_s` raises TimeoutError.
    """

    endpoint: calls.Endpoint

    def for_role(self, role: Role) -> RemoteQueue:
        """For a process that is to do no more than this."""
        return RemoteQueue(replace(self.endpoint, token=token_for(role, self.endpoint.token)))

    @contextmanager
    def portal(self) -> Iterator[Portal[Any]]:
        with asyncio.Runner() as runner:
            yield runner.run

    async def disconnect(self) -> None:
        """End this event loop's connection, which ends with the loop anyway: what it has leased goes out again."""
        connecting = _connections.get(asyncio.get_running_loop(), {}).pop(self._key, None)
        if connecting is not None:
            (await connecting).end("this client has disconnected")

    def end(self, why: str) -> None:
        """End this event loop's connection for good: every call fails with this reason, those that wait too."""
        connecting = _connections.get(asyncio.get_running_loop(), {}).get(self._key)
        if connecting is not None and connecting.done() and connecting.exception() is None:
            connecting.result().end(why)

    @property
    def _key(self) -> tuple[str, bytes]:
        return self.endpoint.address, self.endpoint.token

    async def _run(self, call: calls.Call) -> Any:
        return await (await self._connection()).run(call)

    async def _connection(self) -> Connection:
        connections = _connections.setdefault(asyncio.get_running_loop(), {})
        connecting = connections.get(self._key)
        if connecting is None or _is_inherited(connecting):
            connecting = connections[self._key] = asyncio.ensure_future(Connection.open(self.endpoint))
        if connecting.done():
            return connecting.result()
        return await asyncio.shield(connecting)


def _is_inherited(connecting: asyncio.Task[Connection]) -> bool:
    """Of a process that forked while its event loop ran."""
    return connecting.done() and connecting.exception() is None and connecting.result().inherited
