"""Who takes part in weight transfers, under which number, at which version, and whether it is well.

A pure state machine: it is told what happened and when, and asks nobody. The coordinator of a job drives one; the
service keeps one for whoever is outside of it. It holds nothing that its members cannot tell again: a new one is as
good as the old one once they have all joined it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["engine", "scorer"]
Health = Literal["well", "silent", "lost", "leaving", "away", "joining"]
"""leaving: it finishes what it runs, and gets no more weights; away: it did, and may come back; joining: it works once
it has the weights of the next transfer."""
MemberRequest = Literal["leave", "join"]


@dataclass(frozen=True, slots=True)
class Member:
    """One receiver. kind: an engine takes a version when it is told to, a scorer each as soon as it is there; place:
    the host or device where it runs; seen_at: seconds on the caller's clock; trouble: what was last reported of it."""

    name: str
    kind: Kind
    version: int
    place: str
    seen_at: float
    health: Health = "well"
    trouble: str = ""
    wish: MemberRequest | None = None
    """What it was asked to do before the next transfer."""


class MembershipConflict(RuntimeError):
    """What was asked of a member cannot be done. The message says why."""


class UnknownMember(KeyError):
    """It has not joined, or the membership was made anew since: it should join and tell its version."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"{self.name!r} is no member; join first"


class Membership:
    """`epoch` grows whenever those who take part change: links between them have to be made anew then."""

    def __init__(self) -> None:
        self.epoch = 0
        self._members: dict[str, Member] = {}

    def join(self, name: str, *, kind: Kind = "engine", version: int = 0, place: str = "", now: float = 0.0) -> Member:
        """Take part from the next transfer on; who joins again, after it or this was restarted, tells its version."""
        member = Member(name, kind, version, place, now)
        before = self._members.get(name)
        self._members[name] = member
        if before is None or before.health == "lost":
            self.epoch += 1
        return member

    def leave(self, name: str) -> None:
        """Take no part from the next transfer on, and be forgotten. Raises UnknownMember."""
        self.of(name)
        del self._members[name]
        self.epoch += 1

    def lose(self, name: str, trouble: str) -> None:
        """It takes no part any more, and why. It serves what it served. Raises UnknownMember."""
        self._members[name] = replace(self.of(name), health="lost", trouble=trouble)
        self.epoch += 1

    def seen(self, name: str, version: int, now: float) -> Member:
        """It is there, and holds this version. Raises UnknownMember; a lost one is not found again by this, only by
        `join`."""
        member = self.of(name)
        health: Health = "well" if member.health == "silent" else member.health
        self._members[name] = replace(member, version=version, seen_at=now, health=health)
        return self._members[name]

    def took(self, name: str, version: int) -> None:
        """It has loaded this version. Raises UnknownMember."""
        self._members[name] = replace(self.of(name), version=version)

    # -- engines that leave and come back

    def ask(self, name: str, wish: MemberRequest) -> Member:
        """It is to leave, or to come back, before the next transfer. Raises MembershipConflict, or UnknownMember."""
        member = self.of(name)
        staying = [other for other in self.working if other != name and self.of(other).wish != "leave"]
        if wish == "leave" and (name not in self.working or not staying):
            raise MembershipConflict(
                f"{name} cannot leave: " + ("no engine would be left" if not staying else _is(member))
            )
        if wish == "join" and member.health != "away" and (member.health not in _WORK or member.wish is None):
            raise MembershipConflict(f"{name} cannot join: {_is(member)}")
        back = wish == "join" and member.health in _WORK  # it has not left yet
        return self._change(name, wish=None if back else wish)

    def turn(self) -> list[Member]:
        """A transfer begins: who was asked to leave takes no part in it, and who was asked to join does. These."""
        asked = [member for member in self._members.values() if member.wish is not None]
        changed = [
            self._change(member.name, wish=None, health="leaving" if member.wish == "leave" else "joining")
            for member in asked
        ]
        self.epoch += bool(changed)
        return changed

    def rested(self, name: str) -> None:
        """Who leaves has finished what it ran."""
        if self.of(name).health == "leaving":
            self._change(name, health="away")

    def entered(self, name: str) -> bool:
        """It has the weights of a transfer; whether it works from now on, and did not before."""
        joins = self.of(name).health == "joining"
        if joins:
            self._change(name, health="well")
        return joins

    def _change(self, name: str, **changes: Any) -> Member:
        self._members[name] = replace(self.of(name), **changes)
        return self._members[name]

    # -- what is known of them

    def note_silence(self, now: float, after_s: float) -> list[str]:
        """Mark as silent who was not seen for longer than that; their names, those of lost ones aside."""
        for member in self._members.values():
            if member.health == "well" and now - member.seen_at > after_s:
                self._members[member.name] = replace(member, health="silent")
        return [member.name for member in self._members.values() if member.health == "silent"]

    def of(self, name: str) -> Member:
        """Raises UnknownMember."""
        try:
            return self._members[name]
        except KeyError:
            raise UnknownMember(name) from None

    @property
    def members(self) -> list[Member]:
        """In the order in which they joined, lost ones too."""
        return list(self._members.values())

    @property
    def versions(self) -> dict[str, int]:
        return {member.name: member.version for member in self._members.values()}

    @property
    def working(self) -> list[str]:
        """Engines that generate."""
        return [m.name for m in self._members.values() if m.kind == "engine" and m.health in _WORK]

    @property
    def ranks(self) -> dict[str, int]:
        """The numbers in the group of the next transfer: the sender is 0, members follow as they joined."""
        return {name: number for number, name in enumerate(self._taking_part(), start=1)}

    def _taking_part(self) -> Iterable[str]:
        return (member.name for member in self._members.values() if member.health in (*_WORK, "joining"))


_WORK: tuple[Health, ...] = ("well", "silent")


def _is(member: Member) -> str:
    return f"it is {member.health}" + (f", and asked to {member.wish}" if member.wish else "")
