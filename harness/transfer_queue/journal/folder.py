"""Which files a queue has in its folder, and which of them count: at every moment some that belong together.

CURRENT               the number of the snapshot that counts; none counts before it is there
snapshot-N.msgpack    the queue as it was when journal N was begun
journal-N.log         what changed it then; continued by the journal of the next number that there is
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"(snapshot|journal)-(\d+)\.(?:msgpack|log)")


class Folder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def make(self) -> None:
        """It is there afterwards."""
        self.path.mkdir(parents=True, exist_ok=True)

    def snapshot(self, number: int) -> Path:
        return self.path / f"snapshot-{number}.msgpack"

    def journal(self, number: int) -> Path:
        return self.path / f"journal-{number}.log"

    def current(self) -> int | None:
        """The number of the snapshot that counts."""
        file = self.path / "CURRENT"
        return int(file.read_text()) if file.exists() else None

    def journals(self) -> list[int]:
        """The numbers of those that count, in order."""
        return sorted(n for kind, n, _ in self._files() if kind == "journal" and n >= (self.current() or 0))

    def next_number(self) -> int:
        """Larger than that of any file."""
        return max((number for _, number, _ in self._files()), default=-1) + 1

    def switch(self, number: int) -> None:
        """From now on this snapshot counts, which is on the disk; what is older goes."""
        self.sync()
        fresh = self.path / "CURRENT.new"
        with fresh.open("w") as file:
            file.write(f"{number}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.path / "CURRENT")
        self.sync()
        for _, old, path in self._files():
            if old < number:
                path.unlink()

    def sync(self) -> None:
        """Returns when the names of its files are on the disk."""
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else reads or writes here meanwhile. ValueError if somebody does: a queue that journals here. Ends
        with the process, however it ends."""
        directory = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path} is in use by a queue: save to another folder, or end that queue"
                ) from None
            yield
        finally:
            os.close(directory)

    def _files(self) -> list[tuple[str, int, Path]]:
        matches = [(_NAME.fullmatch(path.name), path) for path in self.path.iterdir()]
        return [(match[1], int(match[2]), path) for match, path in matches if match]
