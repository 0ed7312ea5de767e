"""The queue in any process with an event loop: a TransferQueue over a socket."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from harness.rpc.channel import Channel
from harness.rpc.handshake import Role, greet, token_for
from harness.rpc.sockets import ClientSocket, Framed, abandon_in_children, close_all, connected
from harness.rpc.stream import FramedStream, PendingCalls
from harness.transfer_queue.queue import Portal
from harness.transfer_queue.remote import calls
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.storage.protocol import QueueSession, Storage


class Connection:
    """Carries out calls, any number at a time. Once it has failed, every call says so: what became of the queue is not
    to be guessed. sock, channel: of a server that proved that it has the token."""

    storage: Storage

    def __init__(self, endpoint: calls.Endpoint, sock: ClientSocket, channel: Channel) -> None:
        self._endpoint = endpoint
        self.ended: str | None = None
        self.inherited = False
        self._stream = FramedStream(sock, channel, self._take, self._lost)
        self._calls = PendingCalls(self._stream, self._withdraw)
        self._until_loop_ends = self._guard()
        abandon_in_children(self)

    @classmethod
    async def open(cls, endpoint: calls.Endpoint) -> Connection:
        """PermissionError without the right token, ConnectionError where no queue listens."""
        address = endpoint.address
        try:
            async with asyncio.timeout(endpoint.call_timeout_s):
                sock = await connected(address)
        except PermissionError:
            raise
        except (OSError, TimeoutError) as error:
            raise ConnectionError(f"no transfer queue listens on {address}: {error}") from None
        try:
            async with asyncio.timeout(endpoint.call_timeout_s):
                channel = await greet(sock, endpoint.token, "the transfer queue", address)
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(calls.waited(endpoint, "its greeting")) from None
            if isinstance(error, OSError) and not isinstance(error, PermissionError):
                raise ConnectionError(calls.lost(endpoint, error)) from None
            raise
        connection = cls(endpoint, sock, channel)
        try:
            await connection._enter()
        except BaseException:
            connection.end("the transfer queue did not let this client in")
            raise
        return connection

    async def _enter(self) -> None:
        await anext(self._until_loop_ends)
        endpoint = self._endpoint
        try:
            welcome = await self._calls.greeting(endpoint.call_timeout_s)
        except TimeoutError:
            raise TimeoutError(calls.waited(endpoint, "its greeting")) from None
        answer = self._decoded(welcome)
        if not isinstance(answer, m.Welcome):
            raise ConnectionError(f"what listens on {endpoint.address} is no transfer queue")
        self.storage = endpoint.backend.storage(QueueSession(answer.queue, answer.writer))

    async def _guard(self) -> AsyncGenerator[None, None]:
        """An event loop that shuts down ends its generators, and with this one the connection."""
        try:
            yield
        finally:
            self.end("its event loop was shut down")
            _connections.pop(asyncio.get_running_loop(), None)  # whose entry would hold the loop for ever

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
        if isinstance(step, calls.AskServer):
            return await self._request(step)
        if isinstance(step, calls.Notify):
            return self._notify(step.message)
        if self.storage.waits:
            return await asyncio.to_thread(step.work, self.storage)
        return step.work(self.storage)

    async def _request(self, step: calls.AskServer) -> calls.Response:
        if self.ended is not None:
            raise ConnectionError(self.ended)
        timeout_s = None if step.waits else self._endpoint.call_timeout_s
        try:
            frame = await self._calls.ask(m.encode(step.message), step.descriptors, timeout_s)
        except TimeoutError:
            raise TimeoutError(calls.waited(self._endpoint, calls.describe(step.message))) from None
        return self._decoded(frame), frame.descriptors

    def _notify(self, message: m.Message) -> None:
        if self.ended is None:
            self._calls.tell(m.encode(message))

    def _withdraw(self, call: int) -> None:
        """The caller has gone: what it was to get, here already or on its way, goes back."""
        self._notify(m.Withdraw(call))

    def _decoded(self, frame: Framed) -> m.AnyResponse:
        try:
            return m.decode_answer(frame.body)
        except msgspec.MsgspecError as error:
            close_all(frame.descriptors)
            why = f"the transfer queue on {self._endpoint.address} sent what is no answer: {error}"
            self.end(why)
            raise ConnectionError(why) from None

    def _take(self, frame: Framed) -> None:
        if self._calls.take(frame) or frame.call:
            return
        notice = self._decoded(frame)
        if isinstance(notice, m.Failed):
            self.end(f"the transfer queue on {self._endpoint.address} ended the connection: {notice.text}")
        else:
            calls.handle_notice(self.storage, notice)

    def _lost(self, error: Exception | None) -> None:
        self.end(calls.lost(self._endpoint, error or "its process has ended"))

    def end(self, why: str) -> None:
        """Every call fails with this reason, those that wait too."""
        if self.ended is not None:
            return
        self.ended = why
        self._stream.close()
        self._calls.fail(ConnectionError, why)
        self._close_storage()

    def abandon(self) -> None:
        """See `sockets.Inherited`."""
        self.inherited = True
        self.ended = "this process was forked from the one that was connected"
        self._stream.abandon()
        self._close_storage()

    def _close_storage(self) -> None:
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
        """The queue for a process that is to do no more than this role may."""
        return RemoteQueue(replace(self.endpoint, token=token_for(role, self.endpoint.token)))

    async def agree(self, world: str, what: str, rank: int, ranks: int) -> int:
        """Ask as `service.meetings.Meetings.agree` says, from any process."""
        number: int = await self._run(calls.send(m.Agree(world, what, rank, ranks), waits=True))
        return number

    async def lacking(self, world: str, what: str, ranks: int) -> list[int]:
        """Name the ranks that `service.meetings.Meetings.lacking` does."""
        lacking: list[int] = await self._run(calls.send(m.Verb("lacking", (world, what, ranks))))
        return lacking

    async def note(self, world: str, what: str, count: int) -> None:
        """Note as `service.meetings.Meetings.note` says."""
        await self._run(calls.send(m.Verb("note", (world, what, count))))

    async def reached(self, world: str, what: str, least: int) -> int:
        """Wait as `service.meetings.Meetings.reached` says."""
        count: int = await self._run(calls.send(m.Reached(world, what, least), waits=True))
        return count

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
    """Whether the connection is that of a process that forked while its event loop ran."""
    return connecting.done() and connecting.exception() is None and connecting.result().inherited
