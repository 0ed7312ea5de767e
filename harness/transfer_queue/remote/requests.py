"""Requests of one client of the queue, as its server carries them out: begun in the order it came, and nothing waits
for another."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness.rpc.channel import Channel
from harness.rpc.handshake import Role
from harness.rpc.sockets import Framed, close_all
from harness.rpc.stream import ServedStream
from harness.transfer_queue.control.spec import QueueSpec, Status
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.rows.columns import Rows
from harness.transfer_queue.rows.frames import BatchAssignment, Frame
from harness.transfer_queue.service.meetings import Meetings
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.service.waiting import PendingGet
from harness.transfer_queue.snapshots.snapshot import save
from harness.transfer_queue.storage.gather import trimmed

if TYPE_CHECKING:
    from harness.transfer_queue.remote.server import QueueServer

_WAITING = 1 << 16  # requests of a client that may wait at a time

_log = logging.getLogger(__name__)


class HeldLeases:
    """The leases that a client was handed and may still lose: what it has not said to have received, and what it has
    not acknowledged of tasks with leases."""

    def __init__(self, service: QueueService) -> None:
        self._service = service
        self._unconfirmed: dict[int, int] = {}  # not received yet: lease -> call
        self._leased: set[int] = set()  # of tasks with leases, not acknowledged
        self._kept: dict[int, int] = {}  # the last that counted as received when it was sent: lease -> call

    def hold(self, lease: int, call: int, is_leased: bool) -> None:
        """Note that a lease is on its way, as the answer to this call."""
        self._unconfirmed[lease] = call
        if is_leased:
            self._leased.add(lease)

    def received(self, lease: int) -> None:
        """Note that the client has read what it was handed."""
        self._unconfirmed.pop(lease, None)
        self._service.received(lease)

    def keep(self, lease: int, call: int) -> None:
        """Count a lease as received, as it is sent."""
        self._kept = {lease: call}
        self.received(lease)

    def done(self, lease: int) -> None:
        """The client is done with it, one way or the other."""
        self._unconfirmed.pop(lease, None)
        self._leased.discard(lease)

    def take_back(self, lease: int) -> None:
        """Give the rows of a lease back to the queue."""
        self.done(lease)
        self._service.give_back(lease)

    def withdraw(self, call: int) -> None:
        """Take back what answered this call: who made it has gone before it had the answer."""
        assigned = self._unconfirmed | self._kept
        for lease in [lease for lease, answered in assigned.items() if answered == call]:
            self.take_back(lease)

    def lose(self) -> None:
        """The client has gone: all goes out again."""
        self._service.lose(self._unconfirmed.keys() | self._leased)


class Requests:
    """Serves a client from its welcome to the end of its stream, as far as its role may ask.

    Waits for nothing: a call that does is a task of its own. sock, channel: of a client that proved this role; on_gone:
    called once, at the end.
    """

    def __init__(
        self,
        server: QueueServer,
        sock: socket.socket,
        channel: Channel,
        role: Role,
        writer: int,
        on_gone: Callable[[int], Any],
    ) -> None:
        self._server, self._service = server, server.service
        self._role, self._writer, self._on_gone = role, writer, on_gone
        self._leases = HeldLeases(server.service)
        self._waiting: dict[int, asyncio.Task[None] | PendingGet] = {}
        self._consumers: set[str] = set()  # that it asked for, and that were not released since
        self.stream = ServedStream(
            sock,
            channel,
            self.serve,
            self._ended,
            name=f"client {writer}",
            refusal=lambda error: m.encode(m.failed(error)),
            room=server.room,
            limit=server.limit,
            descriptors=1,
        )

    def send(self, call: int, answer: m.Message, descriptors: Sequence[int] = ()) -> None:
        """An answer to a call; 0: to none. Descriptors stay the caller's. ValueError where it is too long."""
        self.stream.send(call, m.encode(answer), descriptors)

    def was_only(self, consumer: str) -> bool:
        """Whether it asked for this one, which is no more, and for no other that is left."""
        asked = consumer in self._consumers
        self._consumers.discard(consumer)
        return asked and not self._consumers

    def _ended(self, error: Exception | None) -> None:
        for call in list(self._waiting):
            self._stop_waiting(call)
        self._on_gone(self._writer)
        self._leases.lose()

    def serve(self, frame: Framed) -> None:
        """Answer a request, or leave it to a task to do so."""
        try:
            request = decoded(frame.body)
            asked = request.verb if isinstance(request, m.Verb) else type(request).__name__
            if asked not in MAY[self._role]:
                raise PermissionError(f"a {self._role} of the queue may not ask for {asked}")
            match request:
                case m.Put():
                    self._put(frame.call, request)
                case m.Get():
                    self._get(frame.call, request)
                case m.Received():
                    self._leases.received(request.lease)
                case m.Withdraw():
                    self._withdraw(request.call)
                case m.OpenSegment():
                    self._open(frame, request)
                case m.CreatePartition():
                    self._begin(frame.call, partial(_create, self._service, request))
                case m.Agree(world, what, rank, ranks):
                    self._begin(frame.call, partial(self._server.meetings.agree, world, what, rank, ranks))
                case m.Reached(world, what, least):
                    self._begin(frame.call, partial(self._server.meetings.reached, world, what, least))
                case m.Save():
                    self._begin(frame.call, partial(_save, self._service, request, self._server.saves))
                case m.Verb():
                    self._carry_out(frame.call, request)
        except Exception as error:  # the caller's, whatever it is
            self._fail(frame.call, error)
        finally:
            close_all(frame.descriptors)

    def _carry_out(self, call: int, request: m.Verb) -> None:
        verb, arguments = read_verb(request)
        if verb is QueueService.release:
            self._server.end_clients_of(arguments[0], self)
        if verb in (QueueService.acknowledge, QueueService.give_back):
            self._leases.done(arguments[0])
        owner = self._server.meetings if request.verb in _MEETS else self._service
        self.send(call, m.Done(verb(owner, *arguments)))

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
        self._service.put(request.partition, rows, frame, weights)
        self.send(call, m.Done())

    def _get(self, call: int, request: m.Get) -> None:
        self._consumers.add(request.request.consumer)
        answer = self._service.try_get(request.request)
        if answer is not Status.WAIT:
            return self._answer_get(call, request, answer)
        self._check_waiting(call)
        pending = self._waiting[call] = self._service.wait_for(request.request)
        pending.answer.add_done_callback(partial(self._got, call, request, pending))

    def _got(self, call: int, request: m.Get, pending: PendingGet, answer: asyncio.Future[Any]) -> None:
        """A get that waited has its answer, unless it was withdrawn."""
        self._service.answered(pending)
        if self._waiting.get(call) is pending:
            del self._waiting[call]
            try:
                self._answer_get(call, request, answer.result())
            except Exception as error:  # the caller's, whatever it is
                self._fail(call, error)

    def _answer_get(self, call: int, request: m.Get, answer: BatchAssignment | Status) -> None:
        if isinstance(answer, BatchAssignment):
            self._assign(call, request, answer)
        else:
            self.send(call, m.Done())

    def _assign(self, call: int, request: m.Get, assignment: BatchAssignment) -> None:
        """ValueError, and the rows go back, where it is more than a message takes."""
        lease = assignment.lease
        self._leases.hold(lease, call, self._server.spec.tasks[request.request.task].lease_s is not None)
        received = request.keeps and self._server.store.pinned
        try:
            if self._server.segments is None:
                assignment = trimmed(assignment, self._server.spec.columns)
                self.send(call, m.assigned(assignment, assignment.frames, received))
            else:
                frames, descriptors = self._server.segments.placed(assignment)
                self.send(call, m.assigned(assignment, frames, received), descriptors)
        except ValueError:
            self._leases.take_back(lease)
            raise
        if received:
            self._leases.keep(lease, call)

    def _withdraw(self, call: int) -> None:
        self._stop_waiting(call)
        self._leases.withdraw(call)

    def _stop_waiting(self, call: int) -> None:
        waiting = self._waiting.pop(call, None)
        if isinstance(waiting, PendingGet):
            self._service.withdraw(waiting)
        elif waiting is not None:
            waiting.cancel()

    def _check_waiting(self, call: int) -> None:
        if len(self._waiting) >= _WAITING or call in self._waiting:
            raise ValueError(f"call {call} cannot wait: {len(self._waiting)} calls of this client do, maybe it too")

    def _begin(self, call: int, begin: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """A call that may wait. It begins before the client's next request does."""
        self._check_waiting(call)
        self._waiting[call] = asyncio.get_running_loop().create_task(self._finish(call, begin))
        self.stream.hold()

    async def _finish(self, call: int, begin: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            self.send(call, m.Done(await begin()))
        except Exception as error:  # the caller's, whatever it is
            self._fail(call, error)
        finally:
            self._waiting.pop(call, None)


_VERBS: Mapping[str, tuple[Callable[..., Any], Any]] = {
    "set_bound": (QueueService.set_bound, tuple[str, str, int, int]),
    "drop": (QueueService.drop, tuple[str, str, int]),
    "begin_again": (QueueService.begin_again, tuple[str, list[int]]),
    "give_up": (QueueService.give_up, tuple[str, list[int]]),
    "finish": (QueueService.finish, tuple[str, list[int]]),
    "acknowledge": (QueueService.acknowledge, tuple[int]),
    "give_back": (QueueService.give_back, tuple[int]),
    "reassign": (QueueService.reassign, tuple[str, list[int], str]),
    "release": (QueueService.release, tuple[str]),
    "clear": (QueueService.clear, tuple[str]),
    "clear_finished": (QueueService.clear_finished, tuple[()]),
    "waiting": (QueueService.waiting_now, tuple[()]),
    "close": (QueueService.close, tuple[()]),
    "describe": (QueueService.describe, tuple[()]),
    "lacking": (Meetings.lacking, tuple[str, str, int]),
    "note": (Meetings.note, tuple[str, str, int]),
}
"""Verbs that never wait: what carries one out, and the types of its arguments."""

_MEETS = frozenset({"Agree", "Reached", "lacking", "note"})
_READS = _MEETS | {"Get", "Received", "Withdraw", "set_bound", "acknowledge", "give_back", "waiting", "describe"}
_WRITES = _READS | {"OpenSegment", "Put"}
MAY: Mapping[Role, frozenset[str]] = {
    "reader": _READS,
    "writer": _WRITES,
    "admin": _WRITES | {"CreatePartition", "Save"} | _VERBS.keys(),
}
"""Requests that a client of each role may make, by their verbs, or else their messages."""


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


def read_verb(request: m.Verb) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The verb of the service or of the meetings, and its arguments. ValueError where they are of other types than it
    takes, KeyError where there is none of this name."""
    verb, types = _VERBS[request.verb]
    return verb, msgspec.convert(request.arguments, types)


def read_put(request: m.Put, spec: QueueSpec) -> tuple[Rows, Frame, dict[str, Rows]]:
    """ValueError where rows, weights and frame do not fit together, or the schema."""
    rows, frame = m.to_rows(request.rows), request.frame
    if frame.rows != rows.size:
        raise ValueError(f"a frame of {frame.rows} rows came for {rows.size} row ids")
    frame.check(spec.columns)
    weights = {name: m.to_rows(data) for name, data in request.weights.items()}
    for name, lengths in weights.items():
        if lengths.size != rows.size:
            raise ValueError(f"column {name!r} has {lengths.size} lengths for {rows.size} row ids")
    return rows, frame, weights
