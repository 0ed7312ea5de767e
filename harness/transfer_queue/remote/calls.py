"""Calls of a queue's verbs, with what each says to the server and makes of the answers: the same for every client,
whichever way it waits.

A call is a generator of steps; a client carries each one out and sends its result in.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from harness.rpc.sockets import Address, close_all
from harness.transfer_queue.control.spec import GetRequest, QueueSpec
from harness.transfer_queue.queue import TransferQueue
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.rows.columns import Batch, Column, as_integers
from harness.transfer_queue.rows.frames import Frame
from harness.transfer_queue.storage.protocol import QueueBackend, Storage
from harness.transfer_queue.storage.shm import Segment, ShmStorage

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """All that a client needs to know of a queue. token: keep it from processes that the queue is not for;
    call_timeout_s: how long the server may take for what it need not wait for."""

    address: Address
    token: bytes = field(repr=False)
    backend: QueueBackend
    spec: QueueSpec
    call_timeout_s: float = 60.0


class AskServer(msgspec.Struct, frozen=True):
    """Send it and wait for the answer: a `Response`. waits: for as long as the server lives."""

    message: m.Message
    descriptors: Sequence[int] = ()
    waits: bool = False


class Notify(msgspec.Struct, frozen=True):
    """Send it; its answer, if any, is ignored."""

    message: m.Message


class StorageWork(msgspec.Struct, frozen=True):
    """A step for the client's storage, whose result goes back to the call."""

    work: Callable[[Storage], Any]


Step = AskServer | Notify | StorageWork
Response = tuple[m.AnyResponse, list[int]]
"""An answer, and the descriptors that came with it, which are now the caller's."""
Call = Generator[Step, Any, Any]


def value(answer: m.AnyResponse) -> Any:
    """The value of an answer; raises what the server failed with."""
    if isinstance(answer, m.Failed):
        raise m.raised(answer)
    if not isinstance(answer, m.Done):
        raise ConnectionError(f"the transfer queue answered with {type(answer).__name__}")
    return answer.value


def send(message: m.Message, *, waits: bool = False) -> Call:
    """A call that sends one message. waits: for as long as the server lives."""
    answer, _ = yield AskServer(message, waits=waits)
    return value(answer)


def create_partition(name: str, rows: Iterable[int], group_size: int, timeout_s: float | None) -> Call:
    """The call of `TransferQueue.create_partition`."""
    return send(m.CreatePartition(name, as_integers(rows, "rows").tobytes(), group_size, timeout_s), waits=True)


def put(spec: QueueSpec, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> Call:
    """The call of `TransferQueue.put`."""
    ids = as_integers(rows, "rows")
    weights = spec.check_columns(ids.size, columns)
    frame, segment = yield StorageWork(lambda storage: _write(storage, partition, columns))
    if segment is not None:
        answer, _ = yield AskServer(m.OpenSegment(partition, segment.unit), (segment.descriptor,))
        if isinstance(answer, m.Failed):
            yield StorageWork(lambda storage: _forget_segment(storage, partition))
            raise m.raised(answer)
    message = m.Put(partition, ids.tobytes(), frame, {name: lengths.tobytes() for name, lengths in weights.items()})
    answer, _ = yield AskServer(message)
    if isinstance(answer, m.Failed):
        yield StorageWork(lambda storage: storage.discard(partition, frame))
    return value(answer)


def _write(storage: Storage, partition: str, columns: Mapping[str, Column]) -> tuple[Frame, Segment | None]:
    """The frame, and its segment where the server does not have that yet."""
    frame = storage.write(partition, columns)
    return frame, storage.unannounced(partition) if isinstance(storage, ShmStorage) else None


def _forget_segment(storage: Storage, partition: str) -> None:
    if isinstance(storage, ShmStorage):
        storage.forget(partition)


def get(spec: QueueSpec, request: GetRequest, *, keeps: bool) -> Call:
    """keeps: see `messages.Get`."""
    answer, descriptors = yield AskServer(m.Get(request, keeps), waits=True)
    if not isinstance(answer, m.Assigned):
        return value(answer)
    try:
        assignment = m.to_assignment(answer, descriptors)
        columns = yield StorageWork(lambda storage: storage.read(assignment, spec.columns))
    except BaseException:
        yield Notify(m.Verb("give_back", (answer.lease,)))
        raise
    finally:
        close_all(descriptors)
    if not answer.received:
        yield Notify(m.Received(answer.lease))
    return Batch(assignment.partition, assignment.rows, columns, assignment.lease)


def handle_notice(storage: Storage, notice: m.AnyResponse) -> None:
    """Handle what the server sends unasked."""
    if isinstance(notice, m.Cleared):
        _forget_segment(storage, notice.partition)


def waited(endpoint: Endpoint, what: str) -> str:
    """Why a call ends that had no answer in time."""
    return f"the transfer queue on {endpoint.address} did not answer {what} within {endpoint.call_timeout_s} s"


def lost(endpoint: Endpoint, why: Exception | str) -> str:
    """Why calls end whose connection did."""
    return f"the connection to the transfer queue on {endpoint.address} is lost: {why}"


def describe(message: m.Message) -> str:
    """Words for an error: what was waited for."""
    if isinstance(message, m.Verb):
        return f"{message.verb}({', '.join(map(repr, message.arguments))})"
    of = getattr(message, "request", message)
    known = {name: getattr(of, name, None) for name in ("name", "partition", "task", "consumer", "lease")}
    fields = [f"{name}={value!r}" for name, value in known.items() if value is not None]
    return f"{type(message).__name__}({', '.join(fields)})"


def _sent(
    verb: Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Returned]],
) -> Callable[Concatenate[Verbs, Arguments], Coroutine[Any, Any, Returned]]:
    """A verb of the protocol that the server carries out at once, as a call."""
    parameters = signature(verb)

    @wraps(verb)
    async def call(self: Verbs, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        given = parameters.bind(self, *args, **kwargs)
        given.apply_defaults()
        return await self._run(send(m.Verb(verb.__name__, given.args[1:])))

    return call


class Verbs(TransferQueue):
    """The verbs of a queue at an endpoint, for clients that only differ in how they run a call."""

    endpoint: Endpoint
    keeps: bool = False
    """See `messages.Get`."""

    async def _run(self, call: Call) -> Any:
        raise NotImplementedError

    @property
    def spec(self) -> QueueSpec:
        return self.endpoint.spec

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        await self._run(create_partition(name, rows, group_size, timeout_s))

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        await self._run(put(self.spec, partition, rows, columns))

    async def get_batch(self, request: GetRequest) -> Batch | None:
        return await self._run(get(self.spec, request, keeps=self.keeps))

    set_bound = _sent(TransferQueue.set_bound)
    drop = _sent(TransferQueue.drop)
    begin_again = _sent(TransferQueue.begin_again)
    give_up = _sent(TransferQueue.give_up)
    finish = _sent(TransferQueue.finish)
    acknowledge = _sent(TransferQueue.acknowledge)
    give_back = _sent(TransferQueue.give_back)
    reassign = _sent(TransferQueue.reassign)
    release = _sent(TransferQueue.release)
    clear = _sent(TransferQueue.clear)
    clear_finished = _sent(TransferQueue.clear_finished)
    waiting = _sent(TransferQueue.waiting)
    close = _sent(TransferQueue.close)
    describe = _sent(TransferQueue.describe)

    async def save(self, folder: str) -> None:
        """The queue as it is now, in a folder of the server's machine, while it is in use."""
        await self._run(send(m.Save(folder), waits=True))
