"""Frames on a connected socket in an event loop: of a client, of a client as its server has it; and calls that wait."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from harness.rpc.channel import Channel
from harness.rpc.sockets import (
    ANY_NUMBER,
    CHUNK,
    MESSAGE_LIMIT,
    Framed,
    Framer,
    Outbox,
    Splitter,
    WireError,
    close_all,
    is_of_this_node,
    receive,
)

ROOM = 256 << 20  # bytes; the message that began first has room in any case
SMALL = 1 << 20  # bytes of a message that needs none
PATIENCE_S = 10.0  # in which the first grows by `SMALL`, while others wait for its room


class Room:
    """Gives messages their room in the order in which they began; those behind are not read meanwhile."""

    def __init__(self) -> None:
        self._sizes: dict[ServedStream, int] = {}
        self._watch: asyncio.TimerHandle | None = None

    def begin(self, sender: ServedStream, nbytes: int) -> bool:
        """Whether there is room for its message now; otherwise it is told when."""
        self._sizes[sender] = nbytes
        has_room = sender in self._those_with_room()
        if not has_room and self._watch is None:
            self._look_again()
        return has_room

    def end(self, sender: ServedStream) -> None:
        """Free the room of a message that is whole, or never will be."""
        before = self._those_with_room()
        del self._sizes[sender]
        for one in self._those_with_room():
            if one not in before:
                one.go_on()

    def __contains__(self, sender: ServedStream) -> bool:
        return sender in self._sizes

    def _those_with_room(self) -> list[ServedStream]:
        senders, left = list(self._sizes), ROOM
        for count, sender in enumerate(senders):
            left -= self._sizes[sender]
            if left < 0 and count:
                return senders[:count]
        return senders

    def _look_again(self) -> None:
        """Look after a while at the sender that holds up the others."""
        first = next(iter(self._sizes))
        self._watch = asyncio.get_running_loop().call_later(PATIENCE_S, self._check, first, first.come())

    def _check(self, first: ServedStream, had: int) -> None:
        self._watch = None
        if len(self._those_with_room()) == len(self._sizes):
            return
        if next(iter(self._sizes)) is first and first.come() < had + SMALL:
            first.give_up()
        if len(self._those_with_room()) < len(self._sizes):
            self._look_again()


_UNSENT = 1 << 20  # bytes of answers that a client has not taken, from which no more requests are read
_LOST = 256 << 20  # and from which, beyond the longest message, it is given up
_GOODBYE_S = 30.0  # in which a client may take what it was sent before the end

_log = logging.getLogger(__name__)


class FramedStream:
    """Sends frames, and hands on those that come.

    sock: connected, does not block; channel: what its bytes become, open. on_frame: takes each frame in order, and with
    it its descriptors; on_end: called once, with what ended the connection, None where the other side did. limit: bytes
    of a message; descriptors: that may come with one.
    """

    def __init__(
        self,
        sock: socket.socket,
        channel: Channel,
        on_frame: Callable[[Framed], None],
        on_end: Callable[[Exception | None], None],
        *,
        limit: int = MESSAGE_LIMIT,
        descriptors: int = ANY_NUMBER,
    ) -> None:
        self._sock, self._channel = sock, channel
        self._on_frame, self._on_end = on_frame, on_end
        self._takes = descriptors if is_of_this_node(sock) else 0
        self._framer, self._splitter = Framer(limit), Splitter(limit, self._takes)
        self._outbox = Outbox(sock)
        self._frames: deque[Framed] = deque()  # came, and were not handed on
        self._corked = bytearray()
        self._speaks = True  # and what is sent goes
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._readable)

    def fileno(self) -> int:
        """Number of its descriptor, below 0 once it has ended."""
        return self._sock.fileno()

    @property
    def is_open(self) -> bool:
        """Whether the connection has not ended."""
        return self._sock.fileno() >= 0

    def send(self, call: int, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """A frame; where the connection has ended, nothing. Descriptors stay the caller's. ValueError for a message
        that is longer than the other side takes."""
        data = self._framer.frame(call, body, descriptors)
        if self._corked:
            data = bytes(self._corked) + data
            self._corked.clear()
        self._send(data, descriptors)

    def send_soon(self, call: int, body: bytes) -> None:
        """`send`, with what is sent next in this turn of the event loop, or at its end."""
        frame = self._framer.frame(call, body)
        if not self._corked:
            self._loop.call_soon(self._uncork)
        self._corked += frame

    def close(self, error: Exception | None = None) -> None:
        """End the connection at once, for this reason."""
        if not self.is_open:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        self.abandon()
        self._on_end(error)

    def abandon(self) -> None:
        """Close what this process has of it, and tell neither an event loop nor whom it belongs to."""
        self._speaks = False
        self._sock.close()
        self._outbox.close()
        for frame in self._frames:
            close_all(frame.descriptors)
        self._frames.clear()
        try:
            self._splitter.close()
        except WireError as error:
            self._torn(error)

    def _uncork(self) -> None:
        if self._corked:
            data = bytes(self._corked)
            self._corked.clear()
            self._send(data)

    def _send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        if not self._speaks:
            return
        try:
            self._outbox.send(self._channel.seal(data), descriptors)
        except OSError as error:
            return self._unsendable(error)
        if self._outbox.nbytes:
            self._owes()

    def _unsendable(self, error: OSError) -> None:
        """Close where bytes cannot be sent; where the other side has gone the reader sees it, too, after what came
        before that."""
        if not isinstance(error, BrokenPipeError | ConnectionResetError):
            self.close(error)

    def _owes(self) -> None:
        """The socket did not take all of it."""
        self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            empty = self._outbox.flush()
        except OSError as error:
            self._loop.remove_writer(self._sock.fileno())
            return self._unsendable(error)
        if empty:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data, descriptors = receive(self._sock) if self._takes else (self._sock.recv(CHUNK), ())
            if not data:
                return self.close()
            frames = self._splitter.feed(self._channel.unseal(data), descriptors)
        except BlockingIOError:
            return
        except OSError as error:
            return self._failed(error)
        self._came(frames)

    def _came(self, frames: list[Framed]) -> None:
        """Hand over frames that are whole now."""
        self._frames += frames
        while self._frames:
            self._on_frame(self._frames.popleft())

    def _failed(self, error: OSError) -> None:
        """The connection, the channel, or the rules of frames."""
        self.close(error)

    def _torn(self, error: WireError) -> None:
        """The end came in the middle of a frame: it has its reason already."""


class ServedStream(FramedStream):
    """A client's stream, as its server has it: a client that takes no answers, sends a large message slowly, or breaks
    the rules holds up itself alone.

    name: the client's, for the log; refusal: the message that tells it why it is sent away; room: for large messages of
    all clients. While more than `_UNSENT` bytes of answers are not taken, nothing is read or handed on.
    """

    def __init__(
        self,
        sock: socket.socket,
        channel: Channel,
        on_frame: Callable[[Framed], None],
        on_end: Callable[[Exception | None], None],
        *,
        name: str,
        refusal: Callable[[Exception], bytes],
        room: Room,
        limit: int,
        descriptors: int = 0,
    ) -> None:
        super().__init__(sock, channel, on_frame, on_end, limit=limit, descriptors=descriptors)
        self._name, self._refusal, self._room = name, refusal, room
        self._reading = self._has_room = True
        self._held = False
        self._goodbye: asyncio.TimerHandle | None = None  # once nothing more is said

    def hold(self) -> None:
        """Hand on no frame any more in this turn of the event loop: what was begun goes first."""
        self._held = True
        self._loop.call_soon(self._release)

    def finish(self) -> None:
        """End the connection once the client has taken what it was sent, or has had the time to."""
        if self._goodbye is not None or not self.is_open:
            return
        self._goodbye = self._loop.call_later(_GOODBYE_S, self.close)
        self._speaks = False
        self._leave_room()
        self._read(False)
        if not self._outbox:
            self.close()

    def abandon(self) -> None:
        if self._goodbye is not None:
            self._goodbye.cancel()
        self._leave_room()
        super().abandon()

    # -- as `Room` asks, of a message that needs its room

    def come(self) -> int:
        """Bytes of it that are here."""
        return self._splitter.come

    def go_on(self) -> None:
        """Go on: there is room for all of it."""
        self._has_room = True
        self._read(True)

    def give_up(self) -> None:
        """End it: it has not come for long, and others wait for its room."""
        self._refuse(WireError(f"a message of {self._splitter.unfinished} bytes did not come, and others wait"))

    def _refuse(self, error: WireError) -> None:
        self.send(0, self._refusal(error))
        self.finish()

    def _leave_room(self) -> None:
        if self in self._room:
            self._room.end(self)

    def _read(self, reading: bool) -> None:
        reading = reading and self._has_room and self._speaks and self._outbox.nbytes <= _UNSENT
        if reading and not self._reading:
            self._loop.add_reader(self._sock.fileno(), self._readable)
        elif self._reading and not reading:
            self._loop.remove_reader(self._sock.fileno())
        self._reading = reading

    def _owes(self) -> None:
        if self._outbox.nbytes > self._framer.limit + _LOST:
            _log.warning("%s reads nothing: it is given up", self._name)
            return self.close()
        super()._owes()
        if self._outbox.nbytes > _UNSENT:
            self._read(False)

    def _writable(self) -> None:
        super()._writable()
        if not self.is_open:
            return
        if self._goodbye is not None:
            return None if self._outbox else self.close()
        self._read(True)
        self._hand_on()

    def _release(self) -> None:
        self._held = False
        self._hand_on()

    def _came(self, frames: list[Framed]) -> None:
        self._frames += frames
        if frames and self in self._room:
            self._room.end(self)
        if (announced := self._splitter.unfinished) > SMALL and self not in self._room:
            self._has_room = self._room.begin(self, announced)
            self._read(self._has_room)
        self._hand_on()

    def _hand_on(self) -> None:
        while self._frames and not self._held and self._speaks and self._outbox.nbytes <= _UNSENT:
            self._on_frame(self._frames.popleft())

    def _failed(self, error: OSError) -> None:
        if isinstance(error, WireError):
            self._refuse(error)
        else:  # the channel's too: nothing more can be said through it
            self.close(error)

    def _unsendable(self, error: OSError) -> None:
        if self._reading:
            return super()._unsendable(error)
        self.close(error)  # no reader would see that the client has gone

    def _torn(self, error: WireError) -> None:
        _log.warning("%s: %s", self._name, error)


class PendingCalls:
    """Calls over a stream, numbered from 1, and the answers that they wait for. on_gone: takes the number of a call
    whose caller has gone before it had its answer."""

    def __init__(self, stream: FramedStream, on_gone: Callable[[int], None] = lambda call: None) -> None:
        self._stream = stream
        self._on_gone = on_gone
        self._waiting: dict[int, asyncio.Future[Framed]] = {}
        self._last = 0

    def ask(
        self, body: bytes, descriptors: Sequence[int] = (), timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Framed]:
        """Send it now. To be awaited: the answer, whose descriptors are the caller's. TimeoutError without one in so
        many seconds, ValueError for a message that is too long, and what `fail` is told."""
        self._last += 1
        answer = self._expected(self._last)
        try:
            self._stream.send(self._last, body, descriptors)
        except BaseException:
            del self._waiting[self._last]
            raise
        return self._wait(self._last, answer, timeout_s)

    def greeting(self, timeout_s: float) -> Coroutine[Any, Any, Framed]:
        """Wait for the frame that comes first, unasked; raises as `ask` does."""
        return self._wait(0, self._expected(0), timeout_s)

    def tell(self, body: bytes) -> None:
        """Send it soon; its answer, if any, is ignored."""
        self._last += 1
        self._stream.send_soon(self._last, body)

    def _expected(self, call: int) -> asyncio.Future[Framed]:
        answer = self._waiting[call] = asyncio.get_running_loop().create_future()
        return answer

    async def _wait(self, call: int, answer: asyncio.Future[Framed], timeout_s: float | None) -> Framed:
        timer = None if timeout_s is None else answer.get_loop().call_later(timeout_s, _late, answer)
        try:
            return await answer
        except BaseException:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                close_all(answer.result().descriptors)
            self._on_gone(call)
            raise
        finally:
            self._waiting.pop(call, None)
            if timer is not None:
                timer.cancel()

    def take(self, frame: Framed) -> bool:
        """Whether it is an answer that is waited for; otherwise its descriptors are closed."""
        answer = self._waiting.get(frame.call)
        if answer is None or answer.done():
            close_all(frame.descriptors)
            return False
        answer.set_result(frame)
        return True

    def fail(self, kind: type[Exception], why: str) -> None:
        """Every call that waits raises such an error."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(kind(why))


def _late(answer: asyncio.Future[Framed]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())
