"""Files that are whole or not there; files that grow, of which a checkpoint knows how much; and locks that the
operating system releases when their holder dies."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LOOK_S = 0.05  # between two tries for a lock


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well it is synced and renamed over `path`. A reader
    sees the old file or the new one, never half of one. If the block raises, nothing is left behind."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path` atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class Lock:
    """An exclusive lock on a file (flock), held until `release` or until the process is gone, however it goes. The file
    itself stays: deleting a lock file lets two holders in."""

    def __init__(self, path: Path, *, within_s: float = 0.0, busy: str = "the lock is held by another process") -> None:
        """Take the lock; BlockingIOError with the message `busy` where another holds it for so many seconds."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        due = time.monotonic() + within_s
        while not self._taken():
            if time.monotonic() >= due:
                os.close(self._fd)
                raise BlockingIOError(f"{path}: {busy}")
            time.sleep(_LOOK_S)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Release the lock. Releasing twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class GrowingFile:
    """Goes on from what is there; what is appended is in the hands of the system when `append` returns. Nothing is
    buffered: what a full disk refused would be written again as the file is closed, where nobody hears of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._digest = hashlib.sha256(path.read_bytes())

    @property
    def size(self) -> int:
        """Bytes so far: the file cut there holds what it holds now."""
        return self._file.tell()

    @property
    def digest(self) -> str:
        """SHA-256 of these bytes."""
        return self._digest.hexdigest()

    def append(self, data: ReadableBuffer) -> None:
        """Write data at the end."""
        left = memoryview(data).cast("B")
        while left:  # the system may take a part
            left = left[self._file.write(left) :]
        self._digest.update(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
