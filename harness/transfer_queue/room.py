"""The calls that wait for room: for the rows of a new partition, or for the bytes of a put."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.transfer_queue.parking import deadline


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """size: rows or bytes that it needs; act: what it came for, done as soon as there is room."""

    size: int
    act: Callable[[], None]
    what: str
    acted: asyncio.Future[None]


class RoomLine:
    """Those who wait are let in as they came; `fits`: whether there is room for so much now."""

    def __init__(self, fits: Callable[[int], bool]) -> None:
        self._fits = fits
        self._line: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._line))

    async def wait(
        self, size: int, act: Callable[[], None], what: str, timeout_s: float | None, why: Callable[[], str]
    ) -> None:
        """Returns when `act` was done; raises what it raised. TimeoutError after `timeout_s`, with `why`, which is
        asked only then."""
        waiting = Waiting(size, act, what, asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        self.advance()
        with deadline(waiting.acted, timeout_s, lambda: f"no room for {what} in {timeout_s} s: {why()}"):
            try:
                await waiting.acted
            finally:
                if waiting in self._line:
                    self._line.remove(waiting)
                self.advance()  # whoever stood behind one that gave up

    def advance(self) -> None:
        """There may be room: let in who is next, as long as it fits."""
        while self._line and self._fits(self._line[0].size):
            waiting = self._line.popleft()
            if waiting.acted.done():
                continue
            try:
                waiting.act()
                waiting.acted.set_result(None)
            except Exception as error:  # it is the waiting caller's
                waiting.acted.set_exception(error)

    def turn_away(self, error: Callable[[str], Exception]) -> None:
        """Nobody will be let in any more."""
        while self._line:
            waiting = self._line.popleft()
            if not waiting.acted.done():
                waiting.acted.set_exception(error(waiting.what))
