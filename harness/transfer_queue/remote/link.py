"""A client's connection, in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from harness.transfer_queue.remote import address as addresses
from harness.transfer_queue.remote import auth, calls, forking
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.framing import Outbox, Splitter, WireError, close_all, header, receive
from harness.transfer_queue.storage.protocol import Session, Storage


class Link:
    """Carries out calls, any number at a time. Once it has failed, every call says so: what became of the queue is not
    to be guessed."""

    storage: Storage

    def __init__(self, where: calls.Whereabouts, sock: addresses.ClientSocket) -> None:
        self._where = where
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._splitter = Splitter()
        self._outbox = Outbox(sock)
        self._corked = bytearray()
        self._waiting: dict[int, asyncio.Future[calls.Reply]] = {}
        self._calls = 0
        self.ended: str | None = None
        self.inherited = False
        self._until_loop_ends = self._guard()

    @classmethod
    async def open(cls, where: calls.Whereabouts) -> Link:
        """PermissionError without the right token, ConnectionError where nobody listens."""
        sock, place = addresses.client_socket(where.address)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(where.call_timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, place)
        except (OSError, TimeoutError) as error:
            sock.close()
            raise ConnectionError(f"no transfer queue listens on {where.address}: {error}") from None
        addresses.send_at_once(sock)
        link = cls(where, sock)
        forking.abandon_in_children(link)
        try:
            await link._greet()
        except BaseException:
            link.end("the transfer queue did not let this client in")
            raise
        return link

    async def _greet(self) -> None:
        await anext(self._until_loop_ends)
        self._loop.add_reader(self._sock.fileno(), self._readable)
        answer, _ = await self._reply(0, "its greeting", self._where.call_timeout_s)
        if not isinstance(answer, m.Challenge):
            raise ConnectionError(f"what listens on {self._where.address} is no transfer queue")
        answer, _ = await self._ask(calls.Ask(m.Proof(auth.digest(self._where.token, answer.nonce))))
        if not isinstance(answer, m.Welcome):
            calls.value(answer)
            raise ConnectionError(f"what listens on {self._where.address} is no transfer queue")
        self.storage = self._where.backend.storage(Session(answer.queue, answer.writer))

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
        if isinstance(step, calls.Ask):
            return await self._ask(step)
        if isinstance(step, calls.Tell):
            return self._tell(step.request)
        if self.storage.waits:
            return await asyncio.to_thread(step.work, *step.arguments)
        return step.work(*step.arguments)

    async def _ask(self, step: calls.Ask) -> calls.Reply:
        if self.ended is not None:
            raise ConnectionError(self.ended)
        self._calls += 1
        call = self._calls
        body = m.encode(step.request)
        data = header(call, body, step.descriptors) + body
        if self._corked:
            data = bytes(self._corked) + data
            self._corked.clear()
        self._send(data, step.descriptors)
        return await self._reply(call, step.request, None if step.waits else self._where.call_timeout_s)

    async def _reply(self, call: int, request: m.Message | str, timeout_s: float | None) -> calls.Reply:
        if self.ended is not None:
            raise ConnectionError(self.ended)
        answer: asyncio.Future[calls.Reply] = self._loop.create_future()
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
            what = request if isinstance(request, str) else calls.described(request)
            waited = f"the transfer queue on {self._where.address} did not answer {what}"
            answer.set_exception(TimeoutError(f"{waited} within {self._where.call_timeout_s} s"))

    def _withdraw(self, call: int, answer: asyncio.Future[calls.Reply]) -> None:
        """The caller has gone: what it was to get, here already or on its way, goes back."""
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            close_all(answer.result()[1])
        if self.ended is None:
            self._tell(m.Withdraw(call))

    def _tell(self, request: m.Message) -> None:
        """With what is sent next in this turn of the event loop, or at its end."""
        if self.ended is not None:
            return
        if not self._corked:
            self._loop.call_soon(self._uncork)
        self._calls += 1
        body = m.encode(request)
        self._corked += header(self._calls, body) + body

    def _uncork(self) -> None:
        if self._corked and self.ended is None:
            data = bytes(self._corked)
            self._corked.clear()
            self._send(data)

    def _send(self, data: bytes, descriptors: calls.Sequence[int] = ()) -> None:
        try:
            self._outbox.send(data, descriptors)
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
            frames = self._splitter.feed(data, descriptors)
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
                self.end(f"the transfer queue on {self._where.address} sent what is no answer: {error}")

    def _answered(self, call: int, answer: m.Answer, descriptors: list[int]) -> None:
        waiting = self._waiting.get(call)
        if waiting is not None and not waiting.done():
            waiting.set_result((answer, descriptors))
            return
        close_all(descriptors)
        if call == 0 and isinstance(answer, m.Failed):
            self.end(f"the transfer queue on {self._where.address} ended the connection: {answer.text}")
        elif call == 0:
            calls.noticed(self.storage, answer)

    def _lost(self, error: Exception | None) -> None:
        why = "its process has ended" if error is None else str(error)
        self.end(f"the connection to the transfer queue on {self._where.address} is lost: {why}")

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
        """See `forking`."""
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
