"""One client, as the server sees it: its requests are begun in the order they came, and none waits for another."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from harness.rpc.channel import Channel
from harness.rpc.handshake import ANSWER, REFUSED, Handshake, Role, new_nonce
from harness.rpc.sockets import (
    CHUNK,
    MESSAGE_LIMIT,
    Framed,
    Framer,
    Outbox,
    Splitter,
    WireError,
    close_all,
    receive,
)
from harness.transfer_queue.control.spec import QueueSpec, Status
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.room import SMALL, Room
from harness.transfer_queue.rows.columns import Rows
from harness.transfer_queue.rows.frames import BatchAssignment, Frame
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.snapshots.snapshot import save
from harness.transfer_queue.storage.gather import trimmed
from harness.transfer_queue.storage.protocol import PayloadStore
from harness.transfer_queue.storage.shm import ShmStore

_HANDSHAKE_S = 30.0
_UNSENT = 1 << 20  # bytes of answers not taken, from which no more requests are read
_LOST = MESSAGE_LIMIT + (256 << 20)  # and from which the client is given up
_WAITING = 1 << 16  # requests of a client that may wait at a time

_log = logging.getLogger(__name__)


class Host(Protocol):
    """What a connection needs of its server. segments: the store, where it is one of shared memory; limit: bytes of a
    message; saves: the folder below which it may be saved."""

    spec: QueueSpec
    tokens: Mapping[Role, bytes]
    limit: int
    saves: str | None
    name: str
    service: QueueService
    store: PayloadStore
    segments: ShmStore | None
    room: Room

    def end_clients_of(self, consumer: str, asked_by: ServerConnection) -> None:
        """Of this consumer, which is no more, and of no other; but the one that says so."""


class ServerConnection:
    """Reads a client's requests, from its proof that it has the token to the end of its stream.

    Waits for nothing: a call that does is a task of its own. channel: a new one; admitted(writer): called once it has
    proved it; gone(writer): once, at the end.
    """

    def __init__(
        self,
        server: Host,
        sock: socket.socket,
        channel: Channel,
        writer: int,
        *,
        admitted: Callable[[int], Any],
        gone: Callable[[int], Any],
    ) -> None:
        self._server = server
        self._service = server.service
        self._sock = sock
        self._channel = channel
        self._writer = writer
        self._admitted, self._gone = admitted, gone
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._framer, self._splitter = Framer(server.limit), Splitter(server.limit, descriptors=1)
        self._outbox = Outbox(sock)
        self._todo: deque[Framed] = deque()
        self._held = False  # one was given to a task that has not begun yet: the next follows it
        self._reading = False
        self._has_room = True
        self._waiting: dict[int, asyncio.Task[None]] = {}
        self._unconfirmed: dict[int, int] = {}  # not received yet: lease -> call
        self._leased: set[int] = set()  # of tasks with leases, not acknowledged
        self._kept: dict[int, int] = {}  # the last that counted as received when it was sent: lease -> call
        self._consumers: set[str] = set()  # that it asked for, and that were not released since
        self._ending = False
        self._challenge, self._said = new_nonce(), b""
        self._read: Callable[[], Any] = self._read_hello
        self._deadline = self._loop.call_later(_HANDSHAKE_S, self.close)

    def begin(self) -> None:
        """May be its end, too: the client may have gone."""
        self._read_on(True)
        self._open_channel(b"")

    # -- bytes

    def _read_on(self, reading: bool) -> None:
        reading = reading and self._has_room
        if reading and not self._reading:
            self._loop.add_reader(self._sock.fileno(), self._readable)
        elif self._reading and not reading:
            self._loop.remove_reader(self._sock.fileno())
        self._reading = reading

    def _readable(self) -> None:
        try:
            self._read()
        except BlockingIOError:
            return
        except WireError as error:
            self.send(0, m.failed(error))
            self._end()
        except OSError:  # the channel's too: nothing more can be said through it
            self.close()

    def _read_hello(self) -> None:
        self._open_channel(self._of_a_stranger())

    def _open_channel(self, said: bytes) -> None:
        """At once where that needs nothing of the client."""
        self._deliver(self._channel.begin(said))
        if self._channel.is_open:
            self._read = self._read_proof
            self._post(self._challenge)

    def _of_a_stranger(self) -> bytes:
        """No descriptor is taken: the kernel closes those of bytes that are read without asking for them."""
        if data := self._sock.recv(CHUNK):
            return data
        raise ConnectionError("the client has gone")

    def _read_proof(self) -> None:
        self._said += self._channel.unseal(self._of_a_stranger())
        if len(self._said) < ANSWER:
            return
        for role, token in self._server.tokens.items():  # none is admitted that says more
            if (handshake := Handshake.admitted(token, self._challenge, self._said)) is not None:
                return self._let_in(role, handshake)
        self._post(REFUSED)
        self._end()

    def _let_in(self, role: Role, handshake: Handshake) -> None:
        self._role = role
        self._deadline.cancel()
        self._admitted(self._writer)
        self._post(handshake.server_proof())
        self._read = self._read_requests
        self.send(0, m.Welcome(self._server.name, self._writer))

    def _read_requests(self) -> None:
        data, descriptors = receive(self._sock)
        if not data:
            return self.close()
        frames = self._splitter.feed(self._channel.unseal(data), descriptors)
        self._todo += frames
        self._ask_for_room(self._server.room, bool(frames))
        self._go_on()

    def _ask_for_room(self, room: Room, is_whole: bool) -> None:
        if is_whole and self in room:
            room.end(self)
        if self._splitter.unfinished > SMALL and self not in room:
            self._has_room = room.begin(self, self._splitter.unfinished)
            self._read_on(self._has_room)

    def come(self) -> int:
        """See `room.Sender`."""
        return self._splitter.come

    def go_on(self) -> None:
        """See `room.Sender`."""
        self._has_room = True
        self._read_on(not self._ending and self._outbox.nbytes <= _UNSENT)

    def give_up(self) -> None:
        """See `room.Sender`."""
        announced = self._splitter.unfinished
        self.send(0, m.failed(WireError(f"a message of {announced} bytes did not come, and others wait")))
        self.close()

    def _go_on(self) -> None:
        while self._todo and not self._held and not self._ending and self._outbox.nbytes <= _UNSENT:
            frame = self._todo.popleft()
            try:
                self._serve(frame)
            finally:
                close_all(frame.descriptors)

    def send(self, call: int, answer: m.Message, descriptors: Sequence[int] = ()) -> None:
        """An answer to a call; 0: to none. Descriptors stay the caller's. ValueError where it is too long."""
        if self._ending:
            return
        self._post(self._framer.frame(call, m.encode(answer), descriptors), descriptors)

    def _post(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        self._deliver(self._channel.seal(data), descriptors)

    def _deliver(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            self._outbox.send(data, descriptors)
        except OSError:
            return self.close()
        if self._outbox:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """The client does not read as fast as it asks: its next requests wait, and it is given up where it never
        reads."""
        if self._outbox.nbytes > _LOST:
            _log.warning("client %d reads nothing: it is given up", self._writer)
            return self.close()
        self._loop.add_writer(self._sock.fileno(), self._writable)
        if self._outbox.nbytes > _UNSENT:
            self._read_on(False)

    def _writable(self) -> None:
        try:
            empty = self._outbox.flush()
        except OSError:
            return self.close()
        if empty:
            self._loop.remove_writer(self._sock.fileno())
        if self._ending:
            return self.close() if empty else None
        if self._outbox.nbytes <= _UNSENT:
            self._read_on(True)
            self._go_on()

    def _end(self) -> None:
        """Once the client has taken what it was sent, or has had the time to."""
        if self._ending:
            return
        self._ending = True
        self._read_on(False)
        self._deadline.cancel()
        self._deadline = self._loop.call_later(_HANDSHAKE_S, self.close)
        if not self._outbox:
            self.close()

    def close(self) -> None:
        """What waits is cancelled, and what the client had goes out again."""
        if self._sock.fileno() < 0:
            return
        self._ending = True
        self._deadline.cancel()
        self._read_on(False)
        if self in self._server.room:
            self._server.room.end(self)
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._outbox.close()
        for frame in self._todo:
            close_all(frame.descriptors)
        self._todo.clear()
        try:
            self._splitter.close()
        except WireError as error:
            _log.warning("client %d: %s", self._writer, error)
        for task in list(self._waiting.values()):
            task.cancel()
        self._gone(self._writer)
        self._service.lose(self._unconfirmed.keys() | self._leased)

    # -- requests

    def _serve(self, frame: Framed) -> None:
        """Answer a request, or leave it to a task to do so."""
        try:
            request = decoded(frame.body)
            if type(request) not in MAY[self._role]:
                raise PermissionError(f"a {self._role} of the queue may not ask for {type(request).__name__}")
            match request:
                case m.Put():
                    self._put(frame.call, request)
                case m.Get():
                    self._get(frame.call, request)
                case m.Received():
                    self._received(request.lease)
                case m.Withdraw():
                    self._withdraw(request.call)
                case m.OpenSegment():
                    self._open(frame, request)
                case m.CreatePartition():
                    self._begin(frame.call, partial(_create, self._service, request))
                case m.Save():
                    self._begin(frame.call, partial(_save, self._service, request, self._server.saves))
                case _:
                    if isinstance(request, m.Release):
                        self._server.end_clients_of(request.consumer, self)
                    if isinstance(request, m.Acknowledge | m.GiveBack):
                        self._unconfirmed.pop(request.lease, None)
                        self._leased.discard(request.lease)
                    self.send(frame.call, m.Done(_VERBS[type(request)](self._service, request)))
        except Exception as error:  # the caller's, whatever it is
            self._fail(frame.call, error)

    def _fail(self, call: int, error: Exception) -> None:
        answer = m.failed(error)
        if answer.kind not in m.KINDS:
            _log.error("call %d of client %d failed", call, self._writer, exc_info=error)
        self.send(call, answer)

    def _open(self, frame: Framed, request: m.OpenSegment) -> None:
        if self._server.segments is None or len(frame.descriptors) != 1:
            raise ValueError(f"a segment comes with its descriptor, not with {len(frame.descriptors)}")
        self._service.check_partition(request.partition)
        self._server.segments.open(self._writer, request.partition, request.unit, frame.descriptors[0])
        self.send(frame.call, m.Done())

    def _put(self, call: int, request: m.Put) -> None:
        rows, frame, weights = read_put(request, self._server.spec)
        if self._server.segments is not None:
            self._server.segments.check(self._writer, request.partition, frame)
        if self._service.try_put(request.partition, rows, frame, weights):
            self.send(call, m.Done())
        else:
            put = partial(self._service.put, request.partition, rows, frame, weights, timeout_s=request.timeout_s)
            self._begin(call, put)

    def was_only(self, consumer: str) -> bool:
        """Whether it asked for this one, which is no more, and for no other that is left."""
        asked = consumer in self._consumers
        self._consumers.discard(consumer)
        return asked and not self._consumers

    def _get(self, call: int, request: m.Get) -> None:
        self._consumers.add(request.request.consumer)
        answer = self._service.try_get(request.request)
        if isinstance(answer, BatchAssignment):
            self._assign(call, request, answer)
        elif answer is Status.CLOSED:
            self.send(call, m.Done())
        else:
            self._begin(call, partial(self._service.get, request.request), request)

    def _assign(self, call: int, request: m.Get, assignment: BatchAssignment) -> None:
        """ValueError, and the rows go back, where it is more than a message takes."""
        self._unconfirmed[assignment.lease] = call
        if self._server.spec.tasks[request.request.task].lease_s is not None:
            self._leased.add(assignment.lease)
        received = request.keeps and self._server.store.pinned
        try:
            if self._server.segments is None:
                assignment = trimmed(assignment, self._server.spec.columns)
                self.send(call, m.assigned(assignment, assignment.frames, received))
            else:
                frames, descriptors = self._server.segments.placed(assignment)
                self.send(call, m.assigned(assignment, frames, received), descriptors)
        except ValueError:
            self._take_back(assignment.lease)
            raise
        if received:
            self._kept = {assignment.lease: call}
            self._received(assignment.lease)

    def _received(self, lease: int) -> None:
        self._unconfirmed.pop(lease, None)
        self._service.received(lease)

    def _take_back(self, lease: int) -> None:
        self._unconfirmed.pop(lease, None)
        self._leased.discard(lease)
        self._service.give_back(lease)

    def _withdraw(self, call: int) -> None:
        if call in self._waiting:
            self._waiting.pop(call).cancel()
        assigned = self._unconfirmed | self._kept
        for lease in [lease for lease, answered in assigned.items() if answered == call]:
            self._take_back(lease)

    def _begin(self, call: int, begin: Callable[[], Coroutine[Any, Any, Any]], get: m.Get | None = None) -> None:
        """A call that may wait. It begins before the client's next request does."""
        if len(self._waiting) >= _WAITING or call in self._waiting:
            raise ValueError(f"call {call} cannot wait: {len(self._waiting)} calls of this client do, maybe it too")
        self._waiting[call] = self._loop.create_task(self._finish(call, begin, get))
        self._held = True
        self._loop.call_soon(self._release)

    def _release(self) -> None:
        self._held = False
        self._go_on()

    async def _finish(self, call: int, begin: Callable[[], Coroutine[Any, Any, Any]], get: m.Get | None) -> None:
        try:
            value = await begin()
            if get is not None and isinstance(value, BatchAssignment):
                self._assign(call, get, value)
            else:
                self.send(call, m.Done(value))
        except Exception as error:  # the caller's, whatever it is
            self._fail(call, error)
        finally:
            self._waiting.pop(call, None)


_READS: frozenset[type[m.Request]] = frozenset(
    {m.Get, m.Received, m.Withdraw, m.SetBound, m.Acknowledge, m.GiveBack, m.Waiting, m.Describe}
)
_WRITES: frozenset[type[m.Request]] = _READS.union((m.OpenSegment, m.Put))
MAY: Mapping[Role, frozenset[type[m.Request]]] = {
    "reader": _READS,
    "writer": _WRITES,
    "admin": frozenset(m.Request.__subclasses__()),
}
"""What a client of each role may ask for."""

_VERBS: dict[type[m.Message], Callable[[QueueService, Any], Any]] = {
    m.SetBound: lambda service, request: service.set_bound(request.task, request.consumer, request.below),
    m.Drop: lambda service, request: service.drop(request.task, request.started, request.below),
    m.BeginAgain: lambda service, request: service.begin_again(request.partition, request.rows),
    m.GiveUp: lambda service, request: service.give_up(request.partition, request.rows),
    m.Acknowledge: lambda service, request: service.acknowledge(request.lease),
    m.GiveBack: lambda service, request: service.give_back(request.lease),
    m.Release: lambda service, request: service.release(request.consumer),
    m.Clear: lambda service, request: service.clear(request.partition),
    m.ClearFinished: lambda service, request: service.clear_finished(),
    m.Waiting: lambda service, request: service.waiting_now(),
    m.Close: lambda service, request: service.close(),
    m.Describe: lambda service, request: service.describe(),
}
"""Those that never wait: the answer's value."""


async def _create(service: QueueService, request: m.CreatePartition) -> None:
    await service.create_partition(
        request.name, m.to_rows(request.rows), request.group_size, timeout_s=request.timeout_s
    )


async def _save(service: QueueService, request: m.Save, below: str | None) -> None:
    """PermissionError for a folder that is not below that one."""
    _check_below(request.folder, below)
    await save(service, request.folder)


def _check_below(folder: str, below: str | None) -> None:
    if below is None:
        raise PermissionError(f"{folder}: this queue may be saved in no folder; start it with saves=")
    if not Path(folder).resolve().is_relative_to(Path(below).resolve()):
        raise PermissionError(f"{folder}: this queue may be saved below {below}")


def decoded(body: bytes) -> Any:
    """ValueError for what is no request."""
    try:
        return m.decode_request(body)
    except RecursionError:
        raise ValueError("a message is nested too deep") from None


def read_put(request: m.Put, spec: QueueSpec) -> tuple[Rows, Frame, dict[str, Rows]]:
    """ValueError where rows, weights and frame do not fit together, or the schema."""
    rows, frame = m.to_rows(request.rows), m.to_frame(request.frame)
    if frame.rows != rows.size:
        raise ValueError(f"a frame of {frame.rows} rows came for {rows.size} row ids")
    frame.check(spec.columns)
    weights = {name: m.to_rows(data) for name, data in request.weights.items()}
    for name, lengths in weights.items():
        if lengths.size != rows.size:
            raise ValueError(f"column {name!r} has {lengths.size} lengths for {rows.size} row ids")
    return rows, frame, weights
