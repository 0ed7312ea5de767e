"""A file that grows during a run, and what a checkpoint says of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class GrowingFile:
    """Goes on from what is there; what is appended is in the hands of the system when `append` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
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
        self._file.write(data)
        self._file.flush()
        self._digest.update(data)

    def close(self) -> None:
        self._file.close()
