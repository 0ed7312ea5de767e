"""The order in which roles compute on a device.

Whatever a role computes on a device it computes in its turn. Roles of one device go first come, first served. What is a
collective of several ranks (a training micro-batch, a step, scores by sharded parameters, weights being gathered) must
begin in the same order on every rank, though their rows become ready at different times: the ranks agree on that order
where they meet, in the process of the queue.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.config.fields import some
from harness.runtime.runtime import Waits, open_ended, retrieved
from harness.transfer_queue.remote.client import RemoteQueue


class Turns(Protocol):
    """Turns on a device."""

    def turn(self, who: str) -> AbstractAsyncContextManager[None]:
        """Wait until the device is free for `who` (a role's loop, such as "actor[0].train"), and keep it meanwhile.
        Not to be asked for inside of a turn."""

    def lines(self, owner: str) -> list[str]:
        """A line for each loop of this role that waits for its turn, the longest wait first."""


class NoTurns:
    """Turns of roles that compute on no device, or have one to themselves: they never wait."""

    def turn(self, who: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def lines(self, owner: str) -> list[str]:
        return []


NO_TURNS = NoTurns()


class DeviceTurns:
    """One device, first come, first served. Raises TimeoutError after `limit_s` without a turn."""

    def __init__(self, device: str = "the device", *, limit_s: float | None = None) -> None:
        self._device, self._limit_s = device, limit_s
        self._lock = asyncio.Lock()  # serves in order
        self._holder: str | None = None
        self._waiting: dict[object, str] = {}

    @property
    def holder(self) -> str | None:
        """The loop that computes now."""
        return self._holder

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        if self._lock.locked():
            await self._wait(who)
        else:
            await self._lock.acquire()
        self._holder = who
        try:
            yield
        finally:
            self._holder = None
            self._lock.release()

    async def _wait(self, who: str) -> None:
        waits = object()
        self._waiting[waits] = who
        try:
            async with asyncio.timeout(self._limit_s):
                await self._lock.acquire()
        except TimeoutError:
            raise TimeoutError(f"after {self._limit_s:g} s {self._line(who)}") from None
        finally:
            del self._waiting[waits]

    def lines(self, owner: str) -> list[str]:
        return [self._line(who) for who in self._waiting.values() if who.startswith(f"{owner}.")]

    def _line(self, who: str) -> str:
        return f"{who} waits for {self._device}, which {self._holder or 'the next in line'} holds"


class SeveralDevices:
    """Turns of a worker that computes on several devices at once: the turns of all, taken in ascending order of the
    devices, so that no two workers wait for each other."""

    def __init__(self, devices: Sequence[Turns]) -> None:
        self.devices = devices

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        async with AsyncExitStack() as held:
            for device in self.devices:
                await held.enter_async_context(device.turn(who))
            yield

    def lines(self, owner: str) -> list[str]:
        return [line for device in self.devices for line in device.lines(owner)]


class HeldTurn:
    """A turn that begins and ends in different calls, and is taken once however often it is asked for."""

    def __init__(self, turns: Turns, who: str) -> None:
        self._turns, self._who = turns, who
        self._taking = asyncio.Lock()
        self._turn: AbstractAsyncContextManager[None] | None = None

    @property
    def held(self) -> bool:
        """Whether it has the turn."""
        return self._turn is not None

    async def take(self) -> None:
        """Take the turn, unless it has it."""
        async with self._taking:
            if self._turn is None:
                turn = self._turns.turn(self._who)
                await turn.__aenter__()
                self._turn = turn

    async def give_back(self) -> None:
        """Give the turn back, if it has it."""
        turn, self._turn = self._turn, None
        if turn is not None:
            await turn.__aexit__(None, None, None)


class PlacedTurns:
    """The turns of every worker of a job, by role and number, where these are all in one process.

    devices: of each role; workers: of each role, which have equally many of its devices, in order. What only one worker
    uses needs no turns, and devices that the same workers use are one.
    """

    def __init__(
        self, devices: Mapping[str, Sequence[int]], workers: Mapping[str, int], *, limit_s: float | None
    ) -> None:
        self._limit_s = limit_s
        self._users: dict[int, frozenset[tuple[str, int]]] = {}
        for role, numbers in devices.items():
            for place, device in enumerate(numbers):
                user = (role, place * workers[role] // len(numbers))
                self._users[device] = self._users.get(device, frozenset()) | {user}
        self._turns: dict[frozenset[tuple[str, int]], DeviceTurns] = {}

    def __call__(self, role: str, number: int) -> Turns:
        shared: dict[frozenset[tuple[str, int]], DeviceTurns] = {}
        for device, users in sorted(self._users.items()):
            if (role, number) in users and len(users) > 1 and users not in shared:
                if users not in self._turns:
                    self._turns[users] = DeviceTurns(f"device {device}", limit_s=self._limit_s)
                shared[users] = self._turns[users]
        turns = list(shared.values())
        return SeveralDevices(turns) if len(turns) > 1 else turns[0] if turns else NO_TURNS


# -- several ranks


def world_turns(
    meeting: RemoteQueue, world: str, *, rank: int, ranks: int, device: Turns, limit_s: float | None
) -> Turns:
    """Turns for the collectives of a world; those of one rank only need their device."""
    return device if ranks == 1 else WorldTurns(meeting, world, rank=rank, ranks=ranks, device=device, limit_s=limit_s)


_NAMED = 8
"""Ranks that an error names."""


@dataclass(eq=False)
class _Asked:
    """A rank's wish for the `count`-th turn of a loop, which it makes known as `who`."""

    who: str
    count: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def what(self) -> str:
        return f"{_loop(self.who)}/{self.count}"


class WorldTurns:
    """All ranks compute the same loops in the same order, one at a time; each rank asks for its own part.

    A loop is known by its name without the number in brackets ("actor.train"), has one turn at a time, and asks equally
    often on every rank. A turn is there once every rank has asked for it, and turns come in the order in which that
    happened. Only then is the `device` taken, which other roles of this rank may hold for a while. A loop that was
    cancelled while it waited for a turn cannot ask for another one: the other ranks may be in that turn already.

    meeting: where the ranks of this `world` agree (harness/transfer_queue/service/meetings.py). Raises TimeoutError
    after `limit_s` without a turn. Thirteen attributes: six parameters, and what is known of each loop."""

    def __init__(
        self, meeting: RemoteQueue, world: str, *, rank: int, ranks: int, device: Turns, limit_s: float | None
    ) -> None:
        self._meeting, self._world, self._rank, self._ranks = meeting, world, rank, ranks
        self._device, self._limit_s = device, limit_s
        self._counts = Counter[str]()  # turns asked for, by loop
        self._asked: dict[str, _Asked] = {}  # the latest of each loop
        self._agreed: dict[int, _Asked] = {}  # by number, not granted yet
        self._number = 1  # of the turn that is next, or under way
        self._current: _Asked | None = None
        self._gave_up: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        asked = self._ask(who)
        try:
            await self._wait(asked)
            async with self._device.turn(who):
                yield
        finally:
            self._over(asked)

    def _ask(self, who: str) -> _Asked:
        loop = _loop(who)
        if loop in self._gave_up:
            raise RuntimeError(f"{who} was cancelled while it waited for a turn of all ranks: it cannot go on")
        if loop in self._asked:
            raise RuntimeError(f"{who} asks for a second turn before its first is over")
        self._counts[loop] += 1
        asked = self._asked[loop] = _Asked(who, self._counts[loop])
        # What was asked for is agreed on whatever becomes of the asker: no rank takes back a wish.
        agreeing = asyncio.create_task(self._agree(asked), name=f"{who}: the turn of all ranks")
        self._tasks.add(agreeing)
        agreeing.add_done_callback(self._tasks.discard)
        return asked

    async def _agree(self, asked: _Asked) -> None:
        try:
            number = await self._meeting.agree(self._world, asked.what, self._rank, self._ranks)
        except Exception as error:  # the queue has gone, or another rank's connection
            if not asked.granted.done():
                asked.granted.set_exception(error)
            return
        self._agreed[number] = asked
        self._grant()

    def _grant(self) -> None:
        """Grant the next turn, if it is known and none is under way; that of a loop that gave up is passed over."""
        while self._current is None and (asked := self._agreed.pop(self._number, None)) is not None:
            if asked.granted.done():
                self._number += 1
            else:
                self._current = asked
                asked.granted.set_result(None)

    def _over(self, asked: _Asked) -> None:
        del self._asked[_loop(asked.who)]
        if asked is self._current:
            self._current = None
            self._number += 1
            self._grant()
        else:
            self._gave_up.add(_loop(asked.who))

    async def _wait(self, asked: _Asked) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await asked.granted
        except TimeoutError:
            raise TimeoutError(f"after {self._limit_s:g} s {self._line(asked)}{await self._missing(asked)}") from None

    def lines(self, owner: str) -> list[str]:
        waiting = [asked for asked in self._asked.values() if not asked.granted.done()]
        mine = [self._line(asked) for asked in waiting if asked.who.startswith(f"{owner}.")]
        return mine + self._device.lines(owner)

    def _line(self, asked: _Asked) -> str:
        current = "" if self._current is None else f", now in turn {self._number}, of {self._current.who}"
        return f"{asked.who} waits for its turn {asked.count} in the training world of {self._ranks}{current}"

    async def _missing(self, asked: _Asked) -> str:
        """Words for the ranks that have not asked for it."""
        lacking = await self._meeting.lacking(self._world, asked.what, self._ranks)
        return f"; {_ranks(lacking)} not asked for it" if lacking else "; all ranks have asked for it"


def _loop(who: str) -> str:
    return re.sub(r"\[\d+\]", "", who)


def _ranks(ranks: Sequence[int]) -> str:
    names = some(ranks, _NAMED)
    return f"rank {names} has" if len(ranks) == 1 else f"ranks {names} have"


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
        return self.waits.lines()


def abandon(fetch: asyncio.Task[Any]) -> None:
    """Cancel what was asked ahead, whose asker failed: nobody waits for it any more, and its own end, which may be how
    it met the same death, is no news."""
    fetch.cancel()
    fetch.add_done_callback(retrieved)
