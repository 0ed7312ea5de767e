"""What each verb says to the server and makes of the answers: the same for every client, whichever way it waits.

A call is a generator of steps; a client carries each one out and sends its result in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.transfer_queue.columns import Batch, Column, as_integers
from harness.transfer_queue.control.asks import First
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.address import Address
from harness.transfer_queue.remote.framing import close_all
from harness.transfer_queue.spec import QueueSpec
from harness.transfer_queue.storage.protocol import Backend, Storage
from harness.transfer_queue.storage.shm import ShmStorage


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """All that a client needs to know of a queue. token: keep it from whom the queue is not for; call_timeout_s: how
    long the server may take for what it need not wait for."""

    address: Address
    token: bytes = field(repr=False)
    backend: Backend
    spec: QueueSpec
    call_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """Send it and wait for the answer: a `Reply`. waits: for as long as the server lives."""

    request: m.Message
    descriptors: Sequence[int] = ()
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """Send it; whatever the answer is, nobody wants to know."""

    request: m.Message


@dataclass(frozen=True, slots=True)
class Work:
    """Have the storage do it: what it returns."""

    work: Callable[..., Any]
    arguments: tuple[Any, ...]


Step = Ask | Tell | Work
Reply = tuple[m.Answer, list[int]]
"""An answer, and the descriptors that came with it, which are now the caller's."""
Call = Generator[Step, Any, Any]


def value(answer: m.Answer) -> Any:
    """What the server answered; raises what it failed with."""
    if isinstance(answer, m.Failed):
        raise m.raised(answer)
    if not isinstance(answer, m.Done):
        raise ConnectionError(f"the transfer queue answered with {type(answer).__name__}")
    return answer.value


def ask(request: m.Message) -> Call:
    answer, _ = yield Ask(request)
    return value(answer)


def save(folder: str | None) -> Call:
    answer, _ = yield Ask(m.Save(folder), waits=True)
    return value(answer)


def create_partition(name: str, rows: Iterable[int], group_size: int, timeout_s: float | None) -> Call:
    request = m.CreatePartition(name, as_integers(rows, "rows").tobytes(), group_size, timeout_s)
    answer, _ = yield Ask(request, waits=True)
    return value(answer)


def put(
    storage: Storage,
    spec: QueueSpec,
    partition: str,
    rows: Iterable[int],
    columns: Mapping[str, Column],
    timeout_s: float | None,
) -> Call:
    ids = as_integers(rows, "rows")
    weights = spec.check_columns(ids.size, columns)
    frame = yield Work(storage.write, (partition, columns))
    if isinstance(storage, ShmStorage) and (segment := storage.unannounced(partition)) is not None:
        answer, _ = yield Ask(m.OpenSegment(partition, segment.unit), (segment.descriptor,))
        if isinstance(answer, m.Failed):
            storage.forget(partition)
            raise m.raised(answer)
    request = m.Put(
        partition,
        ids.tobytes(),
        m.from_frame(frame),
        {name: lengths.tobytes() for name, lengths in weights.items()},
        timeout_s,
    )
    answer, _ = yield Ask(request, waits=spec.capacity_bytes is not None)
    if isinstance(answer, m.Failed):
        yield Work(storage.discard, (partition, frame))
    return value(answer)


def get_request(
    task: str,
    count: int,
    consumer: str,
    rank: int,
    minimum: int | None,
    partition: str | None,
    first: First | None,
    timeout_s: float | None,
    keeps: bool,
) -> m.Get:
    least = count if minimum is None else minimum
    return m.Get(task, count, least, consumer, rank, partition, first, timeout_s, keeps)


def get(storage: Storage, spec: QueueSpec, request: m.Get) -> Call:
    answer, descriptors = yield Ask(request, waits=True)
    if not isinstance(answer, m.Handed):
        return value(answer)
    try:
        handout = m.to_handout(answer, descriptors)
        columns = yield Work(storage.read, (handout, spec.columns))
    except BaseException:
        yield Tell(m.GiveBack(answer.lease))
        raise
    finally:
        close_all(descriptors)
    if not answer.received:
        yield Tell(m.Received(answer.lease))
    return Batch(handout.partition, handout.rows, columns, handout.lease)


def noticed(storage: Storage, notice: m.Answer) -> None:
    """What the server says unasked."""
    if isinstance(notice, m.Cleared) and isinstance(storage, ShmStorage):
        storage.forget(notice.partition)


def described(request: m.Message) -> str:
    """For an error: what was waited for."""
    known = {name: getattr(request, name, None) for name in ("name", "partition", "task", "consumer", "lease")}
    fields = [f"{name}={told!r}" for name, told in known.items() if told is not None]
    return f"{type(request).__name__}({', '.join(fields)})"
