"""The rollout engines of a job: which of them work, which take weights, and what becomes of one that is lost or leaves.

`Membership` decides; this makes the calls that follow from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from harness.runtime.handles import Handle, WorkerDied, death_in
from harness.weight_sync.membership import Membership

OnLost = Literal["end", "go_on"]
_ANSWER_S = 1.0


class LostEngine(RuntimeError):
    """Engines died, or did not get a version, and the run ends with them. The message names them, with the reason."""


async def _end(engine: Handle) -> None:
    await engine.end()


def _unheard(engine: str, what: str, why: str) -> None: ...


class Fleet:
    """on_lost: whether a run ends or goes on without an engine that is lost. clear_up: ends such an engine, and gives
    what it had to others. tell: hears of each engine that is lost, leaves or joins, and why."""

    def __init__(
        self,
        engines: Sequence[Handle],
        *,
        on_lost: OnLost = "end",
        clear_up: Callable[[Handle], Awaitable[None]] = _end,
        tell: Callable[[str, Any, str], None] = _unheard,
    ) -> None:
        self.membership = Membership()
        self._handles: dict[str, Handle] = {}
        self._on_lost, self._clear_up, self._tell = on_lost, clear_up, tell
        self._one_at_a_time = asyncio.Lock()
        self._seeing_off: dict[str, asyncio.Task[None]] = {}
        for engine in engines:
            self.add(engine)

    @property
    def working(self) -> list[Handle]:
        """Those that generate: they take weights, too."""
        return [self._handles[name] for name in self.membership.working]

    @property
    def receivers(self) -> list[Handle]:
        """Those that take part in the next transfer: who works, and who will once it has the weights."""
        ranks = self.membership.ranks
        return [handle for name, handle in self._handles.items() if name in ranks]

    def add(self, engine: Handle, version: int = 0) -> None:
        """Another engine, which holds `version`: it works, and takes part from the next transfer on."""
        self.membership.join(engine.name, version=version)
        self._handles[engine.name] = engine

    def remove(self, engine: Handle) -> None:
        """This engine takes part in no later transfer, and nothing is asked of it."""
        self.membership.leave(engine.name)
        del self._handles[engine.name]

    async def lose(self, reasons: Mapping[str, str]) -> None:
        """Go on without these engines; returns once what they had can be taken by others, also where somebody else
        noticed before. Raises LostEngine where the run is to end with them, or where none is left that works."""
        async with self._one_at_a_time:
            lost = {name: why for name, why in reasons.items() if self.membership.of(name).health != "lost"}
            for name, why in lost.items():
                self.membership.lose(name, why)
            if lost and (self._on_lost == "end" or not self.working):
                left = "" if self.working else "; no engine is left to generate"
                raise LostEngine("; ".join(lost.values()) + left)
            for name, why in lost.items():
                await self._clear_up(self._handles[name])
                self._tell(name, "lost", why)

    # -- engines that leave and come back, between two transfers

    async def turn(self) -> None:
        """A transfer is about to begin: who was asked to leave stops taking samples, and finishes those that it has;
        who was asked to come back takes part in it."""
        for task in [task for task in self._seeing_off.values() if task.done()]:
            task.result()
        for member in self.membership.turn():
            name, engine = member.name, self._handles[member.name]
            if member.health == "leaving":
                self._tell(name, "leaves", "")
                self._seeing_off[name] = asyncio.create_task(self._see_off(engine))
            elif await self._lives(engine, "rejoin"):
                self._tell(name, "joins", "")

    def enter(self, engines: Sequence[Handle]) -> None:
        """They have the weights of a transfer: those that were to join work from now on."""
        for engine in engines:
            if self.membership.entered(engine.name):
                self._tell(engine.name, "works", "")

    async def look(self, now: Callable[[], float]) -> None:
        """See which engines answer. One that does not within a second is silent: it computes, or is about to be
        missed by whoever waits for it."""
        asked = [name for name in self._handles if self.membership.of(name).health != "lost"]
        answers = await asyncio.gather(*(_answers(self._handles[name]) for name in asked))
        for name, answered in zip(asked, answers, strict=True):
            if answered and name in self._handles:
                self.membership.seen(name, self.membership.of(name).version, now())
        self.membership.note_silence(now(), _ANSWER_S)

    async def _see_off(self, engine: Handle) -> None:
        if await self._lives(engine, "retire"):
            self.membership.rested(engine.name)
            self._tell(engine.name, "left", "")

    async def _lives(self, engine: Handle, method: str) -> bool:
        """Ask this of it; where it is dead, whoever asked it for samples says so, if anybody did."""
        try:
            await engine.call(method)
        except Exception as error:
            if death_in(error) is None:
                raise
            if method == "rejoin":
                await self.lose({engine.name: str(error)})
            return False
        return True


async def _answers(engine: Handle) -> bool:
    try:
        async with asyncio.timeout(_ANSWER_S):
            await engine.call("waiting")
    except (TimeoutError, WorkerDied):
        return False
    return True
