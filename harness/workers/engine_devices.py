"""Turns on the devices of one engine beside training ranks, each of which has a worker of its own: the engine lives
with that of its first device, and asks the others for theirs where all workers meet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from harness.runtime.runtime import retrieved
from harness.transfer_queue.remote.client import RemoteQueue
from harness.workers.turns import Turns


class EngineTurns:
    """Turns of an engine beside a training rank: what it generates is its own affair, but loading gathers the weights
    from all ranks, and so is a collective of theirs. first: of an engine of several devices, where each has a rank.
    together: all engines generate at the same time, while other roles have rows; one that took its device before
    the others would keep the ranks from what some have begun, and these their devices from the other engines."""

    def __init__(self, device: Turns, world: Turns, first: FirstDevice | None = None, *, together: bool) -> None:
        self._device, self._world, self._first = device, world, first
        self._of_world = (".load", ".generate") if together else (".load",)

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        loads = who.endswith(".load")
        async with (self._world if who.endswith(self._of_world) else self._device).turn(who):
            if self._first is not None:
                await self._first.take_others(who, within_turn=loads)
            yield

    def lines(self, owner: str) -> list[str]:
        return self._world.lines(owner)


class _EngineDevice:
    """Device of an engine among several, whose turns depend on those of the others."""

    def __init__(self, device: Turns, meeting: RemoteQueue, engine: int, limit_s: float | None) -> None:
        self._device, self._meeting, self._engine, self._limit_s = device, meeting, f"engine {engine}", limit_s
        self._waiting: str | None = None

    async def _wait(self, what: str, least: int, *counts: str) -> None:
        """Wait until these counts are so far. Raises TimeoutError, with `what` it waits for, after the limit."""
        self._waiting = what
        try:
            async with asyncio.timeout(self._limit_s):
                for count in counts:
                    await self._meeting.reached(self._engine, count, least)
        except TimeoutError:
            raise TimeoutError(f"after {self._limit_s:g} s {what}") from None
        finally:
            self._waiting = None

    def lines(self, owner: str) -> list[str]:
        """Lines as `Turns` has them."""
        mine = [self._waiting] if self._waiting is not None and self._waiting.startswith(f"{owner}.") else []
        return self._device.lines(owner) + mine


class FirstDevice(_EngineDevice):
    """The first device of an engine, in the worker that has both; the others are `OtherDevice` in theirs.

    A rank begins a turn on another device only after the rank here has begun the same one. So while the engine has this
    device, the others are free as soon as their ranks are done with what had begun: neither ever holds a device and
    waits for another one.

    meeting: of all workers; others: how many other devices. Raises TimeoutError, as the others do, after `limit_s`.
    """

    def __init__(self, device: Turns, meeting: RemoteQueue, *, engine: int, others: int, limit_s: float | None) -> None:
        super().__init__(device, meeting, engine, limit_s)
        self._others = others
        self._begun = self._asked = 0

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        async with self._device.turn(who):
            self._begun += 1
            await self._meeting.note(self._engine, "begun", self._begun)
            yield

    async def engine_sleeps(self) -> None:
        """The engine has started, and given its memory back: ranks may take theirs."""
        await self._meeting.note(self._engine, "sleeps", 1)

    async def take_others(self, who: str, *, within_turn: bool) -> None:
        """Wait until the workers of the other devices have given back the memory that they do not use, after what had
        begun there; but for the turn that their ranks are in together with this one (within_turn)."""
        self._asked += 1
        await self._meeting.note(self._engine, "first ends", self._begun - within_turn)
        await self._meeting.note(self._engine, "asked", self._asked)
        what = f"{who} waits for the other devices of {self._engine}, where ranks are still at work"
        await self._wait(what, self._asked, *(_lent_by(place) for place in range(1, self._others + 1)))


class OtherDevice(_EngineDevice):
    """Another device of an engine than its first one, in a worker with a training rank: number `place` of the engine's.
    give_back: returns memory that this process does not use to the device."""

    def __init__(
        self,
        device: Turns,
        meeting: RemoteQueue,
        *,
        engine: int,
        place: int,
        limit_s: float | None,
        give_back: Callable[[], None],
    ) -> None:
        super().__init__(device, meeting, engine, limit_s)
        self._place, self._give_back = place, give_back
        self._begun = self._done = 0
        self._ended = asyncio.Event()  # a turn, since it was cleared
        self._lending: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        self._begun += 1
        number = self._begun
        await self._wait(f"{who} waits for the first device of {self._engine}, where it has not begun", number, "begun")
        async with self._device.turn(who):
            try:
                yield
            finally:
                self._done = number
                self._ended.set()

    async def begin(self) -> None:
        """Wait until the engine has started and sleeps; from then on it gets the device whenever it asks."""
        await self._wait(f"device {self._place} of {self._engine} waits for the engine to start", 1, "sleeps")
        self._lending = asyncio.create_task(self._lend(), name=f"device {self._place} of {self._engine}")
        self._lending.add_done_callback(retrieved)  # the queue has gone: so has the run

    async def _lend(self) -> None:
        lent = 0
        while True:
            lent = await self._meeting.reached(self._engine, "asked", lent + 1)
            first_ends = await self._meeting.reached(self._engine, "first ends", 0)
            while self._done < first_ends:
                self._ended.clear()
                await self._ended.wait()
            self._give_back()
            await self._meeting.note(self._engine, _lent_by(self._place), lent)


def _lent_by(place: int) -> str:
    return f"lent by {place}"
