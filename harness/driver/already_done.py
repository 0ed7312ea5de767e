"""What of a job was done before it went on from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AlreadyDone:
    """A schedule that goes on from version `done` begins at its beginning all the same: so it comes to know what it
    knew. What it asks for that is of iterations before `done` was done, and is answered at once. brought: the newest
    version of these that it has brought to all engines."""

    done: int = 0
    brought: int = 0
