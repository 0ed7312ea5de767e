"""A file of records, only ever appended to: each a message and the payload that belongs to it, with checksums."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from zlib import crc32

HEAD = struct.Struct("<IQI")
"""Bytes of the message, bytes of the payload behind it, checksum of both."""
CHECK = struct.Struct("<I")
"""Checksum of the head, which follows it: a wrong length must not look like the end of the file."""
START = HEAD.size + CHECK.size
_BUFFERS_PER_CALL = 1024  # the system takes no more

Piece = bytes | memoryview
"""Of single bytes."""


class DamagedFile(ValueError):
    """What was written is not what is there."""


class TornRecord(DamagedFile):
    """The file ends in the middle of a record: its writer died."""

    def __init__(self, path: Path, end: int, rest: int) -> None:
        super().__init__(f"{path} ends {rest} bytes into a record, at offset {end}")
        self._path = path
        self._end = end

    def cut_off(self) -> None:
        """The file ends with the record before it."""
        os.truncate(self._path, self._end)


@dataclass(frozen=True, slots=True)
class Record:
    """start: its offset in the file."""

    start: int
    message: bytes
    payload: bytes = field(repr=False)


class RecordWriter:
    """Appends to a file that it makes. durable: every record is on the disk, and not only with the system, before
    `append` returns. After an OSError the file ends in a torn record and takes no more: OSError again."""

    def __init__(self, path: Path, durable: bool = False) -> None:
        self.path = path
        self._durable = durable
        self._failed: OSError | None = None
        self._file = path.open("xb", buffering=0)

    def append(self, message: bytes, payload: Sequence[Piece] = ()) -> None:
        self.check()
        size, crc = 0, crc32(message)
        for piece in payload:
            size += len(piece)
            crc = crc32(piece, crc)
        head = HEAD.pack(len(message), size, crc)
        try:
            _write(self._file.fileno(), [head + CHECK.pack(crc32(head)) + message, *payload])
            if self._durable:
                self.sync()
        except OSError as error:
            self._failed = error
            raise

    def check(self) -> None:
        """OSError if it takes no more."""
        if self._failed is not None:
            raise OSError(f"{self.path} takes no more, for a write failed: {self._failed}") from self._failed

    def sync(self) -> None:
        """Returns when all is on the disk."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """There was no such file."""
        self.path.unlink(missing_ok=True)


def _write(file: int, pieces: Sequence[Piece]) -> None:
    """All of it: the system may take less at a time."""
    rest = deque(memoryview(piece) for piece in pieces if len(piece))
    while rest:
        written = os.writev(file, list(islice(rest, _BUFFERS_PER_CALL)))
        while rest and written >= len(rest[0]):
            written -= len(rest.popleft())
        if written:
            rest[0] = rest[0][written:]


def read_records(path: Path) -> Iterator[Record]:
    """One after the other. DamagedFile, with file and offset, for one that is not what was written; TornRecord where
    the file ends in the middle of one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start < size:
            if size - start < START:
                raise TornRecord(path, start, size - start)
            head, check = file.read(HEAD.size), file.read(CHECK.size)
            if CHECK.unpack(check)[0] != crc32(head):
                raise _damaged(path, start)
            length, payload, crc = HEAD.unpack(head)
            end = start + START + length + payload
            if end > size:
                raise TornRecord(path, start, size - start)
            record = Record(start, file.read(length), file.read(payload))
            if crc32(record.payload, crc32(record.message)) != crc:
                raise _damaged(path, start)
            yield record
            start = end


def _damaged(path: Path, start: int) -> DamagedFile:
    return DamagedFile(
        f"{path} is damaged: the record at offset {start} is not what was written; "
        f"cut to {start} bytes it holds what came before"
    )
