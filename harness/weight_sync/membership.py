"""The workers that take part in weight transfers, with rank, version and health.

`Membership` is a pure state machine: it is given events with their times, and calls nothing. The coordinator of a job
drives one through its `Fleet`, which makes the calls that follow.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from harness.runtime.runtime import Handle, WorkerDied, death_in, retrieved
from harness.weight_sync.endpoints import EngineWorker

Kind = Literal["engine", "scorer"]
Health = Literal["well", "silent", "lost", "leaving", "away", "joining"]
"""leaving: it finishes what it runs, and gets no more weights; away: it did, and may come back; joining: it works once
it has the weights of the next transfer."""
MemberRequest = Literal["leave", "join"]
OnLost = Literal["end", "go_on"]

_WORKING: tuple[Health, ...] = ("well", "silent")
_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One receiver. kind: an engine takes a version when the schedule says so, a scorer each as soon as it is there;
    seen_at: seconds on the caller's clock; trouble: what was last reported of it; requested: what it is to do before
    the next transfer; due: the first version that it was sent since it came back."""

    name: str
    kind: Kind
    version: int
    seen_at: float = 0.0
    health: Health = "well"
    trouble: str = ""
    requested: MemberRequest | None = None
    due: int = 0


class MembershipConflict(RuntimeError):
    """A member cannot do what was requested. The message says why."""


class UnknownMember(LookupError):
    """Raised for a member that has not joined. The message names it."""


class Membership:
    """`epoch` grows whenever the members that take part change: then they have to connect anew. Methods that take a
    name raise UnknownMember."""

    def __init__(self) -> None:
        self.epoch = 0
        self._members: dict[str, Member] = {}

    def join(self, name: str, *, kind: Kind = "engine", version: int = 0) -> Member:
        """Take part from the next transfer on; a member that joins again, after it was restarted, reports its
        version."""
        member = Member(name, kind, version)
        known = self._members.get(name)
        self._members[name] = member
        if known is None or known.health == "lost":
            self.epoch += 1
        return member

    def mark_lost(self, name: str, trouble: str) -> None:
        """Note that a member takes no part any more, and why. Its version is kept on record."""
        self._change(name, health="lost", trouble=trouble)
        self.epoch += 1

    def seen(self, name: str, version: int, now: float) -> Member:
        """Note that a member is there, and holds this version. A lost member comes back by `join` only."""
        member = self.of(name)
        health: Health = "well" if member.health == "silent" else member.health
        return self._change(name, version=version, seen_at=now, health=health)

    def set_version(self, name: str, version: int) -> None:
        """Note that a member has loaded this version."""
        self._change(name, version=version)

    def mark_silent(self, now: float, after_s: float) -> list[str]:
        """Mark the members that were not seen for longer than that; the names of all silent ones, lost ones aside."""
        for member in self.members:
            if member.health == "well" and now - member.seen_at > after_s:
                self._change(member.name, health="silent")
        return [member.name for member in self._members.values() if member.health == "silent"]

    # -- engines that leave and come back

    def request(self, name: str, requested: MemberRequest) -> Member:
        """Request that a member leaves, or comes back, before the next transfer. Raises MembershipConflict, or
        UnknownMember."""
        member = self.of(name)
        staying = [other for other in self.working if other != name and self.of(other).requested != "leave"]
        if requested == "leave" and (name not in self.working or not staying):
            raise MembershipConflict(
                f"{name} cannot leave: " + ("no engine would be left" if not staying else _state(member))
            )
        if (
            requested == "join"
            and member.health != "away"
            and (member.health not in _WORKING or member.requested is None)
        ):
            raise MembershipConflict(f"{name} cannot join: {_state(member)}")
        still_here = requested == "join" and member.health in _WORKING
        return self._change(name, requested=None if still_here else requested)

    def begin_transfer(self) -> list[Member]:
        """Carry out what was requested: members that leave take no part in this transfer, and those that join do. All
        of these. An engine stays that has become the only one since it was to leave."""
        for member in self.members:
            staying = [name for name in self.working if self.of(name).requested != "leave"]
            if member.requested == "leave" and member.name in self.working and not staying:
                self._change(member.name, requested=None)
        changed = [
            self._change(member.name, requested=None, health="leaving" if member.requested == "leave" else "joining")
            for member in self.members
            if member.requested is not None
        ]
        self.epoch += bool(changed)
        return changed

    def mark_away(self, name: str) -> None:
        """Note that a member that leaves has finished what it ran."""
        if self.of(name).health == "leaving":
            self._change(name, health="away")

    def received(self, name: str, version: int) -> bool:
        """Note that a member has the weights of a transfer; returns whether it works from now on, and did not until
        now."""
        joins = self.of(name).health == "joining"
        if joins:
            self._change(name, health="well", due=version)
        return joins

    def _change(self, name: str, **changes: Any) -> Member:
        self._members[name] = replace(self.of(name), **changes)
        return self._members[name]

    # -- queries

    def of(self, name: str) -> Member:
        """The member of this name. Raises UnknownMember."""
        try:
            return self._members[name]
        except KeyError:
            raise UnknownMember(f"{name!r} is no member") from None

    @property
    def members(self) -> list[Member]:
        """Members in the order in which they joined, lost ones too."""
        return list(self._members.values())

    @property
    def versions(self) -> dict[str, int]:
        """Version of every member, by name."""
        return {member.name: member.version for member in self._members.values()}

    @property
    def working(self) -> list[str]:
        """Engines that generate."""
        return [m.name for m in self._members.values() if m.kind == "engine" and m.health in _WORKING]

    @property
    def behind(self) -> list[str]:
        """Engines that work and hold what they held as they left: they have the next weights in host memory, which
        their schedule has not come to. Until then they can be asked for nothing."""
        return [name for name in self.working if self.of(name).version < self.of(name).due]

    @property
    def ranks(self) -> dict[str, int]:
        """The numbers in the group of the next transfer: the sender is 0, members follow as they joined."""
        taking_part = [member.name for member in self._members.values() if member.health in (*_WORKING, "joining")]
        return {name: rank for rank, name in enumerate(taking_part, start=1)}


def _state(member: Member) -> str:
    return f"it is {member.health}" + (f", and asked to {member.requested}" if member.requested else "")


class LostEngine(RuntimeError):
    """Engines died, or did not get a version, and the run ends with them. The message names them, with the reason."""


Engine_co = TypeVar("Engine_co", bound=EngineWorker, covariant=True)
Replace = Callable[[Handle[Any], str], Awaitable[int | None]]
"""Starts an engine again that is lost, for this reason; the version of the weights that it then holds. None where it
may not be, for it was too often."""


async def _end(engine: Handle[Any]) -> None:
    await engine.end()


async def _nobody(engine: Handle[Any]) -> None: ...


def _ignore(engine: str, what: str, why: str) -> None: ...


class Fleet(Generic[Engine_co]):
    """The rollout engines of a job, by their membership.

    on_lost: whether a run ends or goes on without an engine that is lost for good. clear_up: ends such an engine, and
    gives what it had to others. notify: called for each engine that is lost, leaves or joins, with the reason.
    """

    def __init__(
        self,
        engines: Sequence[Handle[Engine_co]],
        *,
        on_lost: OnLost = "end",
        clear_up: Callable[[Handle[Any]], Awaitable[None]] = _end,
        notify: Callable[[str, Any, str], None] = _ignore,
    ) -> None:
        self.membership = Membership()
        self._handles: dict[str, Handle[Engine_co]] = {}
        self._on_lost, self._clear_up, self._notify = on_lost, clear_up, notify
        self._losing = asyncio.Lock()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._coming: dict[str, asyncio.Task[None]] = {}  # engines that are started again
        self._numbers: dict[str, int] = {}  # of each engine's process
        self._lost = asyncio.Event()  # some were; then there is a new one
        self.replace: Replace | None = None
        """Starts an engine again; None where that cannot be."""
        self.welcome: Callable[[Handle[Engine_co]], Awaitable[None]] = _nobody
        """Called for one that was, and works from now on."""
        for engine in engines:
            self.add(engine)

    @property
    def working(self) -> list[Handle[Engine_co]]:
        """Engines that generate: they take weights, too."""
        return [self._handles[name] for name in self.membership.working]

    @property
    def receivers(self) -> list[Handle[Engine_co]]:
        """Engines that take part in the next transfer: all that work, and those that will once they have the
        weights."""
        ranks = self.membership.ranks
        return [handle for name, handle in self._handles.items() if name in ranks]

    def add(self, engine: Handle[Any], version: int = 0) -> None:
        """Add an engine, which holds `version`: it works, and takes part from the next transfer on."""
        self.membership.join(engine.name, version=version)
        self._handles[engine.name] = engine
        self._numbers[engine.name] = self._numbers.get(engine.name, 0) + 1

    def number(self, name: str) -> int:
        """Number of this engine's process: another one after each restart."""
        return self._numbers[name]

    async def lose(self, reasons: Mapping[str, str], numbers: Mapping[str, int] | None = None) -> None:
        """Take these engines as lost, whatever they still do, and end them. Returns once what they had can be taken by
        others, also where another call lost them first; where they can be started again, that goes on meanwhile
        (`back`). Raises LostEngine where the run is to end with them, or where none is left.

        numbers: of the processes that this is said of; what became of those since counts no more. Without them it is
        said of the engines as they are.
        """
        async with self._losing:
            lost = {
                name: why
                for name, why in reasons.items()
                if self.membership.of(name).health != "lost" and (numbers or self._numbers)[name] == self._numbers[name]
            }
            for name, why in lost.items():
                self.membership.mark_lost(name, why)
            self._lost.set()
            self._lost = asyncio.Event()
            if self.replace is None:
                self._lost_for_good(lost)
            for name in lost:
                await self._clear_up(self._handles[name])
            for name, why in lost.items():
                if self.replace is None:
                    self._notify(name, "lost", why)
                else:
                    self._coming[name] = asyncio.create_task(self._come_back(self.replace, name, why))
                    self._coming[name].add_done_callback(retrieved)

    async def none_works(self) -> None:
        """Wait until no engine works."""
        while self.membership.working:
            await self._lost.wait()

    async def back(self, name: str) -> bool:
        """Whether an engine works: one that is started again is waited for, again where it dies once more as it comes.
        Raises what `lose` does where it comes to that."""
        while (coming := self._coming.get(name)) is not None:
            await asyncio.shield(coming)
        return name in self.membership.working

    async def any_back(self, names: Collection[str] | None) -> None:
        """Wait for the next engine that works again, while none of these does (None: of all) and some are started
        again."""
        while not any(names is None or name in names for name in self.membership.working):
            coming = [task for name, task in self._coming.items() if names is None or name in names]
            if not coming:
                return
            for task in (await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED))[0]:
                task.result()

    async def all_back(self) -> None:
        """Wait until none is being started again any more. Raises as `back` does."""
        while self._coming:
            await self.back(next(iter(self._coming)))

    async def _come_back(self, replace: Replace, name: str, why: str) -> None:
        """Follow an engine from its end until it works, or is lost for good."""
        version = await replace(self._handles[name], why)
        if version is None:
            self._lost_for_good({name: why}, but=name)
            self._notify(name, "lost", why)
        else:
            self.add(self._handles[name], version)
            await self.welcome(self._handles[name])
        if self._coming[name] is asyncio.current_task():  # else it died meanwhile, and comes back once more
            del self._coming[name]

    def _lost_for_good(self, lost: Mapping[str, str], but: str | None = None) -> None:
        """Raises LostEngine where the run is to end with them. but: is not to come back any more."""
        left = self.working or self._coming.keys() - {but}
        if lost and (self._on_lost == "end" or not left):
            raise LostEngine("; ".join(lost.values()) + ("" if left else "; no engine is left to generate"))

    async def begin_transfer(self) -> None:
        """Engines that were asked to leave stop taking samples, and finish those that they have; engines that were
        asked to come back take part in this transfer."""
        for task in [task for task in (*self._leaving.values(), *self._coming.values()) if task.done()]:
            task.result()
        if any(member.requested == "leave" for member in self.membership.members):
            await self._lose_dead()  # else one might leave that is the last
        for member in self.membership.begin_transfer():
            name, engine = member.name, self._handles[member.name]
            if member.health == "leaving":
                self._notify(name, "leaves", "")
                self._leaving[name] = asyncio.create_task(self._retire(engine))
            elif (death := await _death_over(engine.role.rejoin())) is not None:
                await self.lose({name: str(death)})
            else:
                self._notify(name, "joins", "")

    async def _lose_dead(self) -> None:
        """Lose engines that work, as far as anybody knows, and are dead."""
        working = self.working
        deaths = await asyncio.gather(*(engine.death(_ANSWER_S) for engine in working))
        await self.lose(
            {engine.name: f"{engine.name} died: {how}" for engine, how in zip(working, deaths, strict=True) if how}
        )

    def received(self, engines: Sequence[Handle[Any]], version: int) -> None:
        """Note that engines have the weights of a transfer: those that were to join work from now on."""
        for engine in engines:
            if self.membership.received(engine.name, version):
                self._notify(engine.name, "works", "")

    async def check_health(self, now: Callable[[], float]) -> None:
        """See which engines answer. One that does not within a second is silent: it computes, or is about to be found
        dead by the next call that needs it."""
        asked = [name for name in self._handles if self.membership.of(name).health != "lost"]
        answers = await asyncio.gather(*(_answers(self._handles[name]) for name in asked))
        for name, answered in zip(asked, answers, strict=True):
            if answered:
                self.membership.seen(name, self.membership.of(name).version, now())
        self.membership.mark_silent(now(), _ANSWER_S)

    async def _retire(self, engine: Handle[EngineWorker]) -> None:
        """End an engine that leaves. Its death is noticed by the call that waits for its samples, if any."""
        if await _death_over(engine.role.retire()) is None:
            self.membership.mark_away(engine.name)
            self._notify(engine.name, "left", "")


async def _death_over(call: Awaitable[None]) -> Exception | None:
    """The exception that this call raised, where that is a death; None where it raised none."""
    try:
        await call
    except Exception as error:
        if death_in(error) is None:
            raise
        return error
    return None


async def _answers(engine: Handle[EngineWorker]) -> bool:
    try:
        async with asyncio.timeout(_ANSWER_S):
            await engine.role.waiting()
    except (TimeoutError, WorkerDied):
        return False
    return True
