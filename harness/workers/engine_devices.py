"""Turns on the devices of one engine beside training ranks, each of which has a worker of its own: the engine lives
with that of its first device, and asks the others for theirs through a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from harness.runtime.runtime import retrieved
from harness.workers.turns import FIRST_S, GROWTH, LONGEST_S, Store, Turns


class EngineTurns:
    """Turns of an engine beside a training rank: what it generates is its own affair, but loading gathers the weights
    from all ranks, and so is a collective of theirs. first: of an engine of several devices, where each has a rank."""

    def __init__(self, device: Turns, world: Turns, first: FirstDevice | None = None) -> None:
        self._device, self._world, self._first = device, world, first

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        loads = who.endswith(".load")
        async with (self._world if loads else self._device).turn(who):
            if self._first is not None:
                await self._first.take_others(who, within_turn=loads)
            yield

    def lines(self, owner: str) -> list[str]:
        return self._world.lines(owner)


class _EngineDevice:
    """Device of an engine among several, whose turns depend on those of the others."""

    def __init__(self, device: Turns, store: Store, engine: int, limit_s: float | None) -> None:
        self._device, self._store, self._engine, self._limit_s = device, store, engine, limit_s
        self._waiting: str | None = None

    async def _wait(self, there: Callable[[], bool], what: str) -> None:
        self._waiting = what
        await _until(there, self._limit_s, what)
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

    store: of the training world, over a connection of its own; others: how many other devices. Raises TimeoutError, as
    the others do, after `limit_s`.
    """

    def __init__(self, device: Turns, store: Store, *, engine: int, others: int, limit_s: float | None) -> None:
        super().__init__(device, store, engine, limit_s)
        self._others = others
        self._begun = self._asked = 0

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        async with self._device.turn(who):
            self._begun += 1
            self._store.set(_of_engine(self._engine, "begun"), f"{self._begun}")
            yield

    def engine_sleeps(self) -> None:
        """The engine has started, and given its memory back: ranks may take theirs."""
        self._store.set(_of_engine(self._engine, "sleeps"), "")

    async def take_others(self, who: str, *, within_turn: bool) -> None:
        """Wait until the workers of the other devices have given back the memory that they do not use, after what had
        begun there; but for the turn that their ranks are in together with this one (within_turn)."""
        self._asked += 1
        self._store.set(_of_engine(self._engine, "asked"), f"{self._asked} {self._begun - within_turn}")
        lent = [_lent(self._engine, place, self._asked) for place in range(1, self._others + 1)]
        what = f"{who} waits for the other devices of engine {self._engine}, where ranks are still at work"
        await self._wait(lambda: self._store.check(lent), what)
        for key in lent:
            self._store.delete_key(key)


class OtherDevice(_EngineDevice):
    """Another device of an engine than its first one, in a worker with a training rank: number `place` of the engine's.
    give_back: returns memory that this process does not use to the device."""

    def __init__(
        self,
        device: Turns,
        store: Store,
        *,
        engine: int,
        place: int,
        limit_s: float | None,
        give_back: Callable[[], None],
    ) -> None:
        super().__init__(device, store, engine, limit_s)
        self._place, self._give_back = place, give_back
        self._begun = self._done = self._lent = 0
        self._lending: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        self._begun += 1
        number = self._begun
        what = f"{who} waits for the first device of engine {self._engine}, where it has not begun"
        await self._wait(lambda: number <= self._number("begun"), what)
        async with self._device.turn(who):
            try:
                yield
            finally:
                self._done = number

    async def begin(self) -> None:
        """Wait until the engine has started and sleeps; from then on it gets the device whenever it asks."""
        key = _of_engine(self._engine, "sleeps")
        what = f"device {self._place} of engine {self._engine} waits for the engine to start"
        await self._wait(lambda: self._store.check([key]), what)
        self._lending = asyncio.create_task(self._lend(), name=f"device {self._place} of engine {self._engine}")
        self._lending.add_done_callback(retrieved)  # the store has gone: so has the run

    async def _lend(self) -> None:
        while True:
            await _until(self._may_lend, None, "")
            self._lent = self._number("asked")
            self._give_back()
            self._store.set(_lent(self._engine, self._place, self._lent), "")

    def _may_lend(self) -> bool:
        return self._lent < self._number("asked") and self._number("asked", 1) <= self._done

    def _number(self, what: str, place: int = 0) -> int:
        key = _of_engine(self._engine, what)
        return int(self._store.get(key).split()[place]) if self._store.check([key]) else 0


async def _until(there: Callable[[], bool], limit_s: float | None, what: str) -> None:
    """Ask until it is there, often at first. Raises TimeoutError, with these words, after `limit_s`."""
    pause = FIRST_S
    try:
        async with asyncio.timeout(limit_s):
            while not there():
                await asyncio.sleep(pause)
                pause = min(pause * GROWTH, LONGEST_S)
    except TimeoutError:
        raise TimeoutError(f"after {limit_s:g} s {what}") from None


def _of_engine(engine: int, what: str) -> str:
    return f"engines/{engine}/{what}"


def _lent(engine: int, place: int, asked: int) -> str:
    return _of_engine(engine, f"lent/{place}/{asked}")
