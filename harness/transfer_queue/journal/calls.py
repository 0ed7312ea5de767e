"""The calls that changed a queue: recorded by its controller, and made again from the files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from zlib import crc32

import msgspec

from harness.transfer_queue.control.controller import Controller
from harness.transfer_queue.control.spec import GetRequest, QueueSpec, Status
from harness.transfer_queue.journal.files import (
    JOURNAL,
    DamagedFile,
    FileHeader,
    Folder,
    Journal,
    Piece,
    Record,
    TornRecord,
    decode,
    read_records,
)
from harness.transfer_queue.journal.snapshot import Payload, at_hand, read_snapshot, restored
from harness.transfer_queue.rows.columns import Rows
from harness.transfer_queue.rows.frames import BatchAssignment, Frame
from harness.transfer_queue.storage.protocol import Storage

log = logging.getLogger(__name__)

Args = ParamSpec("Args")
Returned = TypeVar("Returned")


def _recorded(method: Callable[Args, Returned], *, if_changed: bool = False) -> Callable[Args, Returned]:
    """A method of Controller whose calls are recorded; if_changed: only those that name a task, for the others changed
    nothing."""

    @wraps(method)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Returned:
        controller, *rest = args
        assert isinstance(controller, JournaledController) and not kwargs
        controller.check()
        answer = method(*args, **kwargs)
        if answer or not if_changed:
            controller.record(method.__name__, *rest)
        return answer

    return call


class JournaledController(Controller):
    """Every call that changed something is in the journal when it returns, as the call itself: made again in the same
    order, they lead to the same state. Until there is a `journal` nothing is recorded. Where a call cannot be recorded
    it fails with OSError, and so do all after it, which change nothing."""

    journal: Journal | None = None
    fetched: dict[int, Payload]
    """Of frames that are about to be put and do not carry their payload, by their `id`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fetched = {}

    create = _recorded(Controller.create)
    set_bound = _recorded(Controller.set_bound)
    drop = _recorded(Controller.drop)
    begin_again = _recorded(Controller.begin_again)
    give_up = _recorded(Controller.give_up)
    clear = _recorded(Controller.clear)
    close = _recorded(Controller.close)
    shift = _recorded(Controller.shift)
    acknowledge = _recorded(Controller.acknowledge, if_changed=True)
    give_back = _recorded(Controller.give_back, if_changed=True)
    release = _recorded(Controller.release, if_changed=True)
    lose = _recorded(Controller.lose, if_changed=True)
    expire = _recorded(Controller.expire, if_changed=True)

    def put(self, partition: str, rows: Rows, frame: Frame, lengths: Mapping[str, Rows], now: float) -> list[str]:
        self.check()
        tasks = super().put(partition, rows, frame, lengths, now)
        if self.journal is not None:
            payload = at_hand(frame) or self.fetched[id(frame)]
            self.record("put", partition, rows, lengths, now, frame.rows, payload.sizes, payload=payload.pieces)
        return tasks

    def dispatch(self, request: GetRequest, now: float) -> BatchAssignment | Status:
        self.check()
        answer = super().dispatch(request, now)
        if isinstance(answer, BatchAssignment):
            self.record("dispatch", request, now, answer.lease, crc32(answer.rows.tobytes()))
        return answer

    def check(self) -> None:
        if self.journal is not None:
            self.journal.check()

    def record(self, *call: Any, payload: Sequence[Piece] = ()) -> None:
        if self.journal is not None:
            self.journal.record(*call, payload=payload)


class ReplayState:
    """A new controller, and what else a service knows, as far as files were read. storage: where payload goes; None:
    frames carry it themselves."""

    def __init__(self, spec: QueueSpec, controller: Controller, storage: Storage | None) -> None:
        self.controller = controller
        self.now = 0.0  # the latest time on record, by the clock of the process that wrote it
        self.torn: TornRecord | None = None  # the last record, where it is
        self._spec = spec
        self._storage = storage
        self._unconfirmed: dict[int, str] = {}

    @property
    def unconfirmed(self) -> dict[int, str]:
        """Assignments whose reader has not said that it received them: lease -> partition."""
        still_open = {lease.number for lease in self.controller.open_leases()}
        return {lease: partition for lease, partition in self._unconfirmed.items() if lease in still_open}

    def read(self, folder: Folder) -> int | None:
        """All that counts; the number of the last file. Logs a last record that is torn. DamagedFile for what was not
        written like this; ValueError for another spec."""
        last, numbers = folder.current(), folder.journals()
        if last is not None:
            begun, state, frames = read_snapshot(folder.snapshot(last), self._spec, self._storage)
            if begun is not None and begun not in numbers:
                raise DamagedFile(
                    f"{folder.journal(begun)} is not there, and with it what changed after {folder.snapshot(last).name}"
                )
            self._start_from(state, frames)
        for number in numbers:
            self._follow(folder.journal(number), last, is_first=number == last, is_last=number == numbers[-1])
            last = number
        return last

    def _start_from(self, state: dict[str, Any], frames: Any) -> None:
        self.now = state["now"]
        self.controller.restore(state["controller"], frames)
        self._unconfirmed = dict(state["unconfirmed"])

    def _follow(self, path: Path, after: int | None, *, is_first: bool, is_last: bool) -> None:
        records = read_records(path)
        try:
            for record in records:
                if record.start:
                    self._apply(record, path)
                    continue
                start = FileHeader.read(record.message, path, JOURNAL, self._spec)
                if not is_first and start.after != after:
                    raise DamagedFile(f"{path} continues number {start.after}, but what is there ends with {after}")
        except TornRecord as torn:
            if not is_last:
                raise
            log.warning("%s: the process that wrote it died; what was being written is left out", torn)
            self.torn = torn

    def _apply(self, record: Record, path: Path) -> None:
        verb, *args = decode(record.message)
        match verb:
            case "put":
                partition, rows, lengths, self.now, count, sizes = args
                frame = restored(partition, count, sizes, record.payload, self._spec, self._storage)
                self.controller.put(partition, rows, frame, lengths, self.now)
            case "dispatch":
                self._dispatch(record, path, *args)
            case "received":
                self._unconfirmed.pop(args[0], None)
            case "expire":
                (self.now,) = args
                self.controller.expire(self.now)
            case "shift":
                self.now += args[0]
                self.controller.shift(*args)
            case "create" | "set_bound" | "drop" | "begin_again" | "give_up" | "clear" | "close":
                getattr(self.controller, verb)(*args)
            case "acknowledge" | "give_back" | "release" | "lose":
                getattr(self.controller, verb)(*args)
            case _:
                raise DamagedFile(f"{path} holds an unknown call {verb!r} at offset {record.start}")

    def _dispatch(self, record: Record, path: Path, request: Any, now: float, lease: int, rows: int) -> None:
        assignment = self.controller.dispatch(msgspec.convert(request, GetRequest), now)
        if isinstance(assignment, BatchAssignment):
            if (assignment.lease, crc32(assignment.rows.tobytes())) == (lease, rows):
                self.now = now
                self._unconfirmed[lease] = assignment.partition
                return
        raise DamagedFile(
            f"{path}: at offset {record.start} lease {lease} held other rows than {assignment}; "
            "it was written by another version of the policies"
        )
