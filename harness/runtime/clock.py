"""Real time."""

from __future__ import annotations

import asyncio
import time


class RealClock:
    """Seconds since `origin`, a reading of time.monotonic.

    All processes of one host share that clock, so one origin gives them one time axis.
    """

    @classmethod
    def starting_now(cls) -> RealClock:
        return cls(time.monotonic())

    def __init__(self, origin: float) -> None:
        self.origin = origin

    def now(self) -> float:
        return time.monotonic() - self.origin

    def restart(self) -> None:
        """Now is 0."""
        self.origin = time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
