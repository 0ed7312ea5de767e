"""What a worker's loops wait for, so that a run that stands still can say why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Waits:
    """A board on which each loop of `owner` pins what it waits for, and takes it down when it goes on."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._pinned: dict[int, str] = {}
        self._count = 0

    @contextmanager
    def __call__(self, loop: str, what: str) -> Iterator[None]:
        """Around one wait: `loop` (its name within the owner) waits for `what`."""
        self._count += 1
        pin = self._count
        self._pinned[pin] = f"{self.owner}.{loop} waits for {what}"
        try:
            yield
        finally:
            del self._pinned[pin]

    def lines(self) -> list[str]:
        """One line per waiting loop, the longest wait first."""
        return list(self._pinned.values())
