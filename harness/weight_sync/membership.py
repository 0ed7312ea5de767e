"""Who takes part in weight transfers, under which number, at which version, and whether it is well.

A pure state machine: it is told what happened and when, and asks nobody. The coordinator of a job drives one; the
service keeps one for whoever is outside of it. It holds nothing that its members cannot tell again: a new one is as
good as the old one once they have all joined it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["engine", "scorer"]
Health = Literal["well", "silent", "lost"]


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
        health: Health = "lost" if member.health == "lost" else "well"
        self._members[name] = replace(member, version=version, seen_at=now, health=health)
        return self._members[name]

    def took(self, name: str, version: int) -> None:
        """It has loaded this version. Raises UnknownMember."""
        self._members[name] = replace(self.of(name), version=version)

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
    def ranks(self) -> dict[str, int]:
        """The numbers in the group of the next transfer: the sender is 0, members follow as they joined."""
        return {name: number for number, name in enumerate(self._taking_part(), start=1)}

    def _taking_part(self) -> Iterable[str]:
        return (member.name for member in self._members.values() if member.health != "lost")
