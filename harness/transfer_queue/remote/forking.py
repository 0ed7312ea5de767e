"""A forked child has its parent's connections, and must not use them: it lets go of them at once."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    def abandon(self) -> None:
        """Close what this process has of it, without a word to the other side or to an event loop."""


_held: weakref.WeakSet[Inherited] = weakref.WeakSet()


def abandon_in_children(connection: Inherited) -> None:
    """From now on, for as long as it lives."""
    _held.add(connection)


def _forked() -> None:
    for connection in list(_held):
        connection.abandon()
    _held.clear()


os.register_at_fork(after_in_child=_forked)
