"""The file of a saved queue, in a folder of its own.

snapshot.msgpack    the queue as it was when it was saved last
snapshot.new        as it is being saved; it gets the name when all of it is on the disk

A snapshot is records, only ever appended to: a message (plain data and arrays in msgpack, so that no code travels) and
the payload that belongs to it, with checksums.
"""

import fcntl
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import msgspec
import numpy as np

from harness.transfer_queue.control.spec import QueueSpec

HEAD = struct.Struct("<IQI")
"""Bytes of the message, bytes of the payload behind it, checksum of both."""
CHECK = struct.Struct("<I")
"""Checksum of the head, which follows it: a wrong length must not look like the end of the file."""
RECORD_HEAD = HEAD.size + CHECK.size
_NAME = "snapshot.msgpack"

Piece = bytes | memoryview
"""A piece of payload, of single bytes."""


class DamagedSnapshot(ValueError):
    """Raised where a file does not hold what was written."""


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """start: its offset in the file."""

    start: int
    message: bytes
    payload: bytes = field(repr=False)


class RecordWriter:
    """Writes a file anew. OSError where a write fails, after which the file is of no use."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def append(self, message: bytes, payload: Sequence[Piece] = ()) -> None:
        """Write a record: a message and its payload."""
        size, crc = 0, crc32(message)
        for piece in payload:
            size += len(piece)
            crc = crc32(piece, crc)
        head = HEAD.pack(len(message), size, crc)
        self._file.writelines([head, CHECK.pack(crc32(head)), message, *payload])

    def sync(self) -> None:
        """Returns when all is on the disk."""
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path) -> Iterator[SnapshotRecord]:
    """Each in turn. DamagedSnapshot, with file and offset, for one that is not what was written, or not whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start < size:
            if size - start < RECORD_HEAD:
                raise _torn(path, start, size - start)
            head, check = file.read(HEAD.size), file.read(CHECK.size)
            if CHECK.unpack(check)[0] != crc32(head):
                raise _damaged(path, start)
            length, payload, crc = HEAD.unpack(head)
            end = start + RECORD_HEAD + length + payload
            if end > size:
                raise _torn(path, start, size - start)
            record = SnapshotRecord(start, file.read(length), file.read(payload))
            if crc32(record.payload, crc32(record.message)) != crc:
                raise _damaged(path, start)
            yield record
            start = end


def _torn(path: Path, start: int, rest: int) -> DamagedSnapshot:
    return DamagedSnapshot(f"{path} ends {rest} bytes into a record, at offset {start}")


def _damaged(path: Path, start: int) -> DamagedSnapshot:
    return DamagedSnapshot(
        f"{path} is damaged: the record at offset {start} is not what was written; "
        f"cut to {start} bytes it holds what came before"
    )


SNAPSHOT = "transfer queue snapshot"
VERSION = 2
_ARRAY = 1  # type number of the extension: three characters of dtype, then the items


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or len(value.dtype.str) != 3:
            raise NotImplementedError(f"an array {value.dtype} {list(value.shape)} has no place in a file")
        return msgspec.msgpack.Ext(_ARRAY, value.dtype.str.encode() + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a {type(value).__name__} has no place in a file")


def _unpack(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f"extension {code} is unknown")
    return np.frombuffer(data[3:], bytes(data[:3]).decode()).copy()


encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode = msgspec.msgpack.Decoder(ext_hook=_unpack).decode


class FileHeader(msgspec.Struct, frozen=True):
    """The first message of a file. kind: what the file is, spec: of its queue, as plain data."""

    kind: str
    spec: dict[str, Any]
    version: int = VERSION

    @classmethod
    def of(cls, spec: QueueSpec) -> Self:
        """The header of a queue of this spec."""
        return cls(SNAPSHOT, msgspec.to_builtins(spec))

    @classmethod
    def check(cls, message: bytes, path: Path, spec: QueueSpec) -> None:
        """ValueError unless the file is a snapshot of this version, and of a queue of this spec."""
        version = decode(message).get("version")
        if version != VERSION:
            raise ValueError(f"{path} has version {version} of the format; this code reads version {VERSION}")
        start = msgspec.msgpack.decode(message, type=cls)
        if start.kind != SNAPSHOT:
            raise ValueError(f"{path} is a {start.kind}, not a {SNAPSHOT}")
        differences = _differences(start.spec, msgspec.msgpack.decode(encode(msgspec.to_builtins(spec))))
        if differences:
            raise ValueError(f"{path} is of another queue: {'; '.join(differences)}")


def _differences(there: Any, here: Any, where: str = "spec") -> list[str]:
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        return [] if there == here else [f"{where} is {there!r} there, {here!r} here"]
    lines = []
    for key in [*there, *(key for key in here if key not in there)]:
        if key in there and key in here:
            lines += _differences(there[key], here[key], f"{where}.{key}")
        else:
            lines.append(f"{where}.{key} is only {'there' if key in there else 'here'}")
    return lines


def saved_in(folder: Path) -> Path:
    """The snapshot that a folder has. ValueError where it has none."""
    path = folder / _NAME
    if not path.is_file():
        raise ValueError(f"no queue was saved in {folder}")
    return path


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A path to write a snapshot to, which replaces that of the folder when it was written without an error, and goes
    with one. The folder is made where it is not there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the rows of a run are its user's
    with locked(folder):
        fresh = folder / "snapshot.new"
        try:
            yield fresh
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        os.replace(fresh, folder / _NAME)
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)  # the name, too
        finally:
            os.close(directory)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """No other process saves or loads here meanwhile. ValueError if one does, and where there is no such folder. Ends
    with the process, however it ends."""
    if not folder.is_dir():
        raise ValueError(f"no queue was saved in {folder}: there is no such folder")
    directory = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use: a queue is being saved there, or loaded from it") from None
        yield
    finally:
        os.close(directory)
