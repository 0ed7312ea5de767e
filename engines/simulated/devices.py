"""Devices that several roles share: one works at a time."""

from __future__ import annotations

import asyncio
import fcntl
from pathlib import Path
from typing import Protocol

from harness.protocols import Clock

_LOOK_AGAIN_S = 0.001


class Device(Protocol):
    """A device, or several that always work together."""

    async def work(self, seconds: float) -> None:
        """Wait for a turn, then let so much time pass while everyone else waits."""


class SharedDevice:
    """Roles of one process take turns in the order in which they came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()

    async def work(self, seconds: float) -> None:
        async with self._turn:
            await self._clock.sleep(seconds)


class LockedDevice:
    """Roles of several processes of one host agree by locks on two files: the one that is next holds the second.

    So no role gets two turns while another waits. The system takes locks from a process that dies. Raises TimeoutError
    after `timeout_s` without a turn.
    """

    def __init__(self, path: Path, clock: Clock, *, timeout_s: float) -> None:
        self._path, self._clock, self._timeout_s = path, clock, timeout_s
        self._turn = asyncio.Lock()  # of the roles of this process

    async def work(self, seconds: float) -> None:
        async with self._turn:
            until = self._clock.now() + self._timeout_s
            with self._path.open("ab") as device:  # closing a file gives its lock back
                with self._path.with_suffix(".next").open("ab") as following:
                    await self._take(following.fileno(), until)
                    await self._take(device.fileno(), until)
                await self._clock.sleep(seconds)

    async def _take(self, descriptor: int, until: float) -> None:
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock.now() >= until:
                    raise TimeoutError(
                        f"waited {self._timeout_s:g} s for a turn on the device of {self._path}; another role holds it"
                    ) from None
            await self._clock.sleep(_LOOK_AGAIN_S)
