"""Answers of every role that computes in turns on its device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from harness.runtime.runtime import Waits, open_ended, retrieved
from harness.workers.turns import Turns


class ComputingRole:
    """owner: its name in lines about waits, such as "actor[0]". turns: on its device."""

    def __init__(self, owner: str, turns: Turns) -> None:
        self.turns, self.waits = turns, Waits(owner, turns.lines)
        self._turns_had = 0
        self._let_go, self._idle = asyncio.Event(), asyncio.Event()
        self._let_go.set()
        self._idle.set()

    @asynccontextmanager
    async def turn(self, loop: str) -> AsyncIterator[None]:
        """The device, for what one of its loops computes there, unless the role is held. A loop that waits for the
        device already, as ranks do for each other, gets it all the same."""
        await self._let_go.wait()
        async with self.turns.turn(f"{self.waits.owner}.{loop}"):
            self._idle.clear()
            try:
                yield
            finally:
                self._idle.set()
        self._turns_had += 1

    @open_ended
    async def hold(self) -> bool:
        """Begin no turn until `let_go`; returns when that which it has is over. Whether it had one: then a role that
        waited for the same device may have got it, and is to be asked again."""
        self._let_go.clear()
        computed = not self._idle.is_set()
        await self._idle.wait()
        return computed

    async def let_go(self) -> None:
        """Go on."""
        self._let_go.set()

    async def progress(self) -> int:
        """Turns that are over."""
        return self._turns_had

    async def waiting(self) -> list[str]:
        """Lines on what its loops wait for."""
        return self.waits.lines()


def abandon(fetch: asyncio.Task[Any]) -> None:
    """Cancel what was asked ahead, whose asker failed: nobody waits for it any more, and its own end, which may be how
    it met the same death, is no news."""
    fetch.cancel()
    fetch.add_done_callback(retrieved)
