"""From files to a queue as it was: the snapshot that counts, and the calls since then made again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from harness.transfer_queue.control.asks import Ask
from harness.transfer_queue.control.restorable import RestorableController
from harness.transfer_queue.frames import Handout
from harness.transfer_queue.journal import journal
from harness.transfer_queue.journal.encoding import Start, decode
from harness.transfer_queue.journal.folder import Folder
from harness.transfer_queue.journal.payload import restored
from harness.transfer_queue.journal.records import DamagedFile, Record, TornRecord, read_records
from harness.transfer_queue.journal.snapshot import read_snapshot
from harness.transfer_queue.spec import QueueSpec
from harness.transfer_queue.storage.protocol import Storage

log = logging.getLogger(__name__)


class Books:
    """What a service knows, as files told it so far, in a new controller. storage: where payload goes; None: frames
    carry it themselves."""

    def __init__(self, spec: QueueSpec, controller: RestorableController, storage: Storage | None) -> None:
        self.controller = controller
        self.now = 0.0  # the latest time on record, by the clock of whoever wrote it
        self.torn: TornRecord | None = None  # the last record, where it is
        self._spec = spec
        self._storage = storage
        self._on_the_way: dict[int, str] = {}

    @property
    def on_the_way(self) -> dict[int, str]:
        """Handouts that nobody said to have received: lease -> partition."""
        still_open = {lease.number for lease in self.controller.open_leases()}
        return {lease: partition for lease, partition in self._on_the_way.items() if lease in still_open}

    def read(self, folder: Folder) -> int | None:
        """All that counts; the number of the last file. Logs a last record that is torn. DamagedFile for what was not
        written like this; ValueError for another spec."""
        last = folder.current()
        if last is not None:
            self._start_from(*read_snapshot(folder.snapshot(last), self._spec, self._storage))
        numbers = folder.journals()
        for number in numbers:
            self._follow(folder.journal(number), last, is_first=number == last, is_last=number == numbers[-1])
            last = number
        return last

    def _start_from(self, state: dict[str, Any], frames: Any) -> None:
        self.now = state["now"]
        self.controller.restore(state["controller"], frames)
        self._on_the_way = dict(state["on_the_way"])

    def _follow(self, path: Path, after: int | None, *, is_first: bool, is_last: bool) -> None:
        records = read_records(path)
        try:
            for record in records:
                if record.start:
                    self._apply(record, path)
                    continue
                start = Start.read(record.message, path, journal.KIND, self._spec)
                if not is_first and start.after != after:
                    raise DamagedFile(f"{path} continues number {start.after}, but what is there ends with {after}")
        except TornRecord as torn:
            if not is_last:
                raise
            log.warning("%s: whoever wrote it died; what was being written is left out", torn)
            self.torn = torn

    def _apply(self, record: Record, path: Path) -> None:
        verb, *args = decode(record.message)
        match verb:
            case "put":
                partition, rows, lengths, self.now, count, sizes = args
                frame = restored(partition, count, sizes, record.payload, self._spec, self._storage)
                self.controller.put(partition, rows, frame, lengths, self.now)
            case "request":
                self._request(record, path, *args)
            case "received":
                self._on_the_way.pop(args[0], None)
            case "expire":
                (self.now,) = args
                self.controller.expire(self.now)
            case "shift":
                self.now += args[0]
                self.controller.shift(*args)
            case "create" | "set_bound" | "drop" | "clear" | "close" | "acknowledge" | "give_back" | "release" | "lose":
                getattr(self.controller, verb)(*args)
            case _:
                raise DamagedFile(f"{path} holds an unknown call {verb!r} at offset {record.start}")

    def _request(self, record: Record, path: Path, ask: Any, now: float, lease: int, rows: int) -> None:
        handout = self.controller.request(msgspec.convert(ask, Ask), now)
        if not isinstance(handout, Handout) or (handout.lease, crc32(handout.rows.tobytes())) != (lease, rows):
            raise DamagedFile(
                f"{path}: at offset {record.start} lease {lease} held other rows than {handout}; "
                "it was written by another version of the policies"
            )
        self.now = now
        self._on_the_way[lease] = handout.partition
