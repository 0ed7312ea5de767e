"""A client's connection for whoever has no event loop: one call at a time, which blocks."""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec

from harness.transfer_queue.remote import address as addresses
from harness.transfer_queue.remote import auth, calls, forking
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.framing import (
    Framed,
    Splitter,
    WireError,
    close_all,
    header,
    portions,
    receive,
    send_some,
)
from harness.transfer_queue.storage.protocol import Session, Storage


class SyncLink:
    """Connects when it is made: PermissionError without the right token, ConnectionError where nobody listens."""

    storage: Storage

    def __init__(self, where: calls.Whereabouts) -> None:
        self._where = where
        self._splitter = Splitter()
        self._frames: list[Framed] = []
        self._calls = 0
        self._used = threading.Lock()
        self.ended: str | None = None
        self.inherited = False
        self._sock, place = addresses.client_socket(where.address)
        try:
            self._sock.settimeout(where.call_timeout_s)
            self._sock.connect(place)
        except OSError as error:
            self._sock.close()
            raise ConnectionError(f"no transfer queue listens on {where.address}: {error}") from None
        addresses.send_at_once(self._sock)
        forking.abandon_in_children(self)
        try:
            self._greet()
        except BaseException:
            self.end("the transfer queue did not let this client in")
            raise

    def _greet(self) -> None:
        answer, _ = self._reply(0)
        if not isinstance(answer, m.Challenge):
            raise ConnectionError(f"what listens on {self._where.address} is no transfer queue")
        answer, _ = self._ask(calls.Ask(m.Proof(auth.digest(self._where.token, answer.nonce))))
        if not isinstance(answer, m.Welcome):
            calls.value(answer)
            raise ConnectionError(f"what listens on {self._where.address} is no transfer queue")
        self.storage = self._where.backend.storage(Session(answer.queue, answer.writer))

    def run(self, call: calls.Call) -> Any:
        """The call's result; raises what it raises. RuntimeError if another thread is in the middle of one."""
        if not self._used.acquire(blocking=False):
            raise RuntimeError("a SyncQueue is for one thread at a time: give each its own")
        try:
            step = next(call)
            while True:
                try:
                    result = self._carry_out(step)
                except BaseException as error:
                    step = call.throw(error)
                else:
                    step = call.send(result)
        except StopIteration as end:
            return end.value
        finally:
            self._used.release()

    def _carry_out(self, step: calls.Step) -> Any:
        if isinstance(step, calls.Ask):
            return self._ask(step)
        if isinstance(step, calls.Tell):
            return self._send(step.request)
        return step.work(*step.arguments)

    def _ask(self, step: calls.Ask) -> calls.Reply:
        if self.ended is not None:
            raise ConnectionError(self.ended)
        call = 0
        try:
            self._give(self._where.call_timeout_s)
            call = self._send(step.request, step.descriptors)
            if step.waits:
                self._give(None)
            return self._reply(call)
        except TimeoutError:
            waited = f"the transfer queue on {self._where.address} did not answer {calls.described(step.request)}"
            self.end(f"{waited} within {self._where.call_timeout_s} s")
            raise TimeoutError(self.ended) from None
        except OSError as error:
            self.end(f"the connection to the transfer queue on {self._where.address} is lost: {error}")
            raise ConnectionError(self.ended) from None
        except BaseException:  # an interrupt: where in a frame that was, nobody knows
            if call:  # what was asked for, here already or on its way, goes back
                self._send(m.Withdraw(call))
            self.end("a call was interrupted")
            raise

    def _give(self, timeout_s: float | None) -> None:
        """So many seconds to what follows. To say so again would be a system call for nothing."""
        if self._sock.gettimeout() != timeout_s:
            self._sock.settimeout(timeout_s)

    def _send(self, request: m.Message, descriptors: calls.Sequence[int] = ()) -> int:
        self._calls += 1
        body = m.encode(request)
        data = header(self._calls, body, descriptors) + body
        for portion, passed in portions(data, descriptors):
            sent = send_some(self._sock, portion, passed)
            if sent < len(portion):
                self._sock.sendall(portion[sent:])
        return self._calls

    def _reply(self, call: int) -> calls.Reply:
        while True:
            while self._frames:
                frame = self._frames[0]
                answer = self._decoded(frame)
                del self._frames[0]  # from here on its descriptors are the caller's
                if frame.call == call:
                    return answer, frame.descriptors
                close_all(frame.descriptors)
                if frame.call == 0 and isinstance(answer, m.Failed):
                    raise ConnectionError(answer.text)
                if frame.call == 0:
                    calls.noticed(self.storage, answer)
            data, descriptors = receive(self._sock)
            if not data:
                raise ConnectionError("its process has ended")
            self._frames += self._splitter.feed(data, descriptors)

    def _decoded(self, frame: Framed) -> m.Answer:
        try:
            return m.decode_answer(frame.body)
        except msgspec.MsgspecError as error:
            raise WireError(f"this is no answer: {error}") from None

    def end(self, why: str) -> None:
        self.ended = self.ended or why
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first
        self._let_go()

    def abandon(self) -> None:
        """See `forking`."""
        self.inherited = True
        self.ended = "this process was forked from the one that was connected"
        self._let_go()

    def _let_go(self) -> None:
        self._sock.close()
        for frame in self._frames:
            close_all(frame.descriptors)
        self._frames.clear()
        try:
            self._splitter.close()
        except WireError:
            pass  # the end has its reason already
        if hasattr(self, "storage"):
            self.storage.close()
