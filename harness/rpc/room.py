"""Memory for large messages that have begun and are not whole: so much of it for all clients of a server."""

from __future__ import annotations

import asyncio
from typing import Protocol

ROOM = 256 << 20  # bytes; the message that began first has room in any case
SMALL = 1 << 20  # bytes of a message that needs none
PATIENCE_S = 10.0  # in which the first grows by `SMALL`, while others wait for its room


class Sender(Protocol):
    """The sender of such a message."""

    def come(self) -> int:
        """Bytes of it that are here."""

    def go_on(self) -> None:
        """Go on: there is room for all of the message."""

    def give_up(self) -> None:
        """End it: it has not come for long, and others wait for its room."""


class Room:
    """Gives messages their room in the order in which they began; those behind are not read meanwhile."""

    def __init__(self) -> None:
        self._sizes: dict[Sender, int] = {}
        self._watch: asyncio.TimerHandle | None = None

    def begin(self, sender: Sender, nbytes: int) -> bool:
        """Whether there is room for its message now; otherwise it is told when."""
        self._sizes[sender] = nbytes
        has_room = sender in self._those_with_room()
        if not has_room and self._watch is None:
            self._look_again()
        return has_room

    def end(self, sender: Sender) -> None:
        """Free the room of a message that is whole, or never will be."""
        before = self._those_with_room()
        del self._sizes[sender]
        for one in self._those_with_room():
            if one not in before:
                one.go_on()

    def __contains__(self, sender: Sender) -> bool:
        return sender in self._sizes

    def _those_with_room(self) -> list[Sender]:
        senders, left = list(self._sizes), ROOM
        for count, sender in enumerate(senders):
            left -= self._sizes[sender]
            if left < 0 and count:
                return senders[:count]
        return senders

    def _look_again(self) -> None:
        """Look after a while at the sender that holds up the others."""
        first = next(iter(self._sizes))
        self._watch = asyncio.get_running_loop().call_later(PATIENCE_S, self._check, first, first.come())

    def _check(self, first: Sender, had: int) -> None:
        self._watch = None
        if len(self._those_with_room()) == len(self._sizes):
            return
        if next(iter(self._sizes)) is first and first.come() < had + SMALL:
            first.give_up()
        if len(self._those_with_room()) < len(self._sizes):
            self._look_again()
