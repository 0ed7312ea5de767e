"""The calls that changed the queue, in their order, written as they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.transfer_queue.journal.encoding import Start, encode
from harness.transfer_queue.journal.folder import Folder
from harness.transfer_queue.journal.records import Piece, RecordWriter
from harness.transfer_queue.spec import QueueSpec

KIND = "transfer queue journal"


class Journal:
    """Goes on in file after file of a folder. after: the number of the snapshot or journal that the first continues.
    durable: each call is on the disk before `record` returns. OSError from the first write that fails on."""

    def __init__(self, folder: Folder, spec: QueueSpec, number: int, after: int | None, durable: bool) -> None:
        self._folder = folder
        self._spec = spec
        self._durable = durable
        self._number = after
        self._file = self._begin(number)

    def _begin(self, number: int) -> RecordWriter:
        file = RecordWriter(self._folder.journal(number), self._durable)
        try:
            file.append(encode(Start.of(KIND, self._spec, self._number)))
            self._folder.sync()
        except BaseException:
            file.close()
            file.remove()
            raise
        self._number = number
        return file

    def go_on(self, number: int) -> None:
        """In a new file."""
        self._file.check()
        old, self._file = self._file, self._begin(number)
        old.close()

    def record(self, *call: Any, payload: Sequence[Piece] = ()) -> None:
        self._file.append(encode(call), payload)

    def check(self) -> None:
        """OSError if nothing can be recorded any more."""
        self._file.check()

    def close(self) -> None:
        self._file.close()
