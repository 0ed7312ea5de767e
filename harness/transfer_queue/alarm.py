"""A timer of the event loop that is set again and again, mostly to what it is set to already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls `ring` once, when `now` has come to the time that it was last set to."""

    def __init__(self, now: Callable[[], float], ring: Callable[[], None]) -> None:
        self._now = now
        self._ring = ring
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due: float | None) -> None:
        """Seconds on the clock of `now`; None: not to ring."""
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, due
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._now()), self._rings)

    def _rings(self) -> None:
        self._timer = self._due = None
        self._ring()
