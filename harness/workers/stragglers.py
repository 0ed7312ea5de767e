"""Which samples have taken too long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from harness.protocols import Clock

_AGAIN_S = 5.0  # an engine may have been asked too early, or may have begun a sample anew
_SAME_TIME_S = 1e-9


class SampleLimit:
    """Samples of one engine, from when it gets each until it is done, its turns included. seconds: on the run's clock
    that each may take."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds, self._clock = seconds, clock
        self._due: dict[int, float] = {}
        self._begun = asyncio.Event()

    def begin(self, samples: Iterable[int]) -> None:
        """They begin now, or begin again."""
        self._due |= dict.fromkeys(samples, self._clock.now() + self._seconds)
        self._begun.set()

    def end(self, sample: int) -> None:
        self._due.pop(sample, None)

    async def overdue(self) -> list[int]:
        """Waits until there are some. What does not end upon it is named again, some seconds later."""
        while True:
            while not self._due:
                self._begun.clear()
                await self._begun.wait()
            now = self._clock.now()
            late = [sample for sample, due in self._due.items() if due <= now + _SAME_TIME_S]
            if late:
                self._due |= dict.fromkeys(late, now + _AGAIN_S)
                return late
            # What begins meanwhile is due no earlier than in so many seconds.
            await self._clock.sleep(min(min(self._due.values()) - now, self._seconds))
