"""Messages of clients and the server: typed msgpack, checked on arrival; no code travels.

Row ids, weights and lengths go as raw int64 bytes. A message is numbered by its frame (`sockets.HEADER`): an answer
carries the number of its request; 0 is that of no request.
"""

from functools import reduce
from operator import or_
from typing import Any

import msgspec
import numpy as np

from harness.transfer_queue.control.controller import QueueClosed
from harness.transfer_queue.control.leases import LeaseExpired
from harness.transfer_queue.control.spec import GetRequest
from harness.transfer_queue.rows.columns import Rows
from harness.transfer_queue.rows.frames import BatchAssignment, Frame, Part

KINDS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TimeoutError, LeaseExpired, QueueClosed, PermissionError, OSError)
}
"""Errors that arrive as what they are. Anything else is a fault of the server, and a RuntimeError to the client."""


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A message; the name of its class is its first item."""


# -- requests


class QueueRequest(Message):
    """A message of a client, once it is admitted."""


class CreatePartition(QueueRequest):
    """Create a partition of these rows (int64)."""

    name: str
    rows: bytes
    group_size: int
    timeout_s: float | None


class OpenSegment(QueueRequest):
    """Comes with the descriptor of a segment, in which the frames of the puts that follow lie."""

    partition: str
    unit: int


class Put(QueueRequest):
    """Write a frame for these rows."""

    partition: str
    rows: bytes
    frame: Frame
    weights: dict[str, bytes]


class Get(QueueRequest):
    """keeps: the client takes what comes, and will not withdraw."""

    request: GetRequest
    keeps: bool = False


class Received(QueueRequest):
    """Confirm that what was dispatched is read. No answer."""

    lease: int


class Withdraw(QueueRequest):
    """The caller of this call has gone: if it waits it takes nothing, and what is on its way goes back. No answer."""

    call: int


class Verb(QueueRequest):
    """Ask for a verb of `TransferQueue` or `Meetings` that never waits, with its arguments in order."""

    verb: str
    arguments: tuple[Any, ...] = ()


class Save(QueueRequest):
    """folder: of the server's machine."""

    folder: str


class Agree(QueueRequest):
    """Ask, as a rank of a world, for what all of its ranks are to agree on."""

    world: str
    what: str
    rank: int
    ranks: int


class Reached(QueueRequest):
    """Wait until a count is so far."""

    world: str
    what: str
    least: int


# -- answers


class Welcome(Message):
    """queue, writer: the `QueueSession`."""

    queue: str
    writer: int


class Done(Message):
    """Answer that the request was carried out."""

    value: Any = None


class Failed(Message):
    """number: errno of what the server's file system refused."""

    kind: str
    text: str
    number: int | None = None


class Assigned(Message):
    """A `BatchAssignment`. Where descriptors come with it, a frame's place is (which of them, where in it). received:
    it counts as received already."""

    lease: int
    partition: str
    rows: bytes
    frames: tuple[Frame, ...]
    parts: tuple[Part, ...]
    received: bool


class Cleared(Message):
    """Unasked: a partition is gone, in which this client has a segment."""

    partition: str


AnyResponse = Welcome | Done | Failed | Assigned | Cleared


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, range):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} has no place in a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
encode = _encoder.encode
decode_request = msgspec.msgpack.Decoder(reduce(or_, QueueRequest.__subclasses__())).decode
decode_answer = msgspec.msgpack.Decoder(AnyResponse).decode


def to_rows(data: bytes) -> Rows:
    """int64 [n], a read-only view. ValueError unless it is whole numbers."""
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are not int64 numbers")
    return np.frombuffer(data, np.int64)


def assigned(assignment: BatchAssignment, frames: tuple[Frame, ...], received: bool) -> Assigned:
    """frames: the assignment's, placed where its reader finds them."""
    rows = assignment.rows.tobytes()
    return Assigned(assignment.lease, assignment.partition, rows, frames, assignment.parts, received)


def to_assignment(message: Assigned, descriptors: list[int]) -> BatchAssignment:
    """An assignment, with a descriptor instead of its index in a frame's place. rows: int64 [k], the reader's own."""
    frames = [
        frame._replace(place=(descriptors[frame.place[0]], frame.place[1]))
        if descriptors and isinstance(frame.place, tuple)
        else frame
        for frame in message.frames
    ]
    rows = to_rows(message.rows).copy()
    return BatchAssignment(message.lease, message.partition, rows, tuple(frames), message.parts)


def failed(error: BaseException) -> Failed:
    """The nearest kind that travels; the name of the type where there is none."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS]
    if kinds[:1] == [OSError.__name__] and isinstance(error, OSError) and error.errno is not None:
        return Failed(kinds[0], error.strerror or str(error), error.errno)
    return Failed(kinds[0] if kinds else type(error).__name__, str(error))


def raised(answer: Failed) -> Exception:
    """The error, as what `queue.TransferQueue` says is raised."""
    if answer.number is not None:
        return OSError(answer.number, answer.text)
    if answer.kind in KINDS:
        return KINDS[answer.kind](answer.text)
    return RuntimeError(f"the transfer queue failed with {answer.kind}: {answer.text}")
