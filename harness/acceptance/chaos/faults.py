"""Faults of a run, drawn from a seed: what happens, to whom, and as which turn of its event loop."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

What = Literal[
    "dies", "engine dies", "stands still", "is slow", "loses weights", "leaves", "joins", "cut", "asked to leave"
]
"""dies: a process, whichever; cut: the driver is killed, and all with it; asked to leave: as SIGTERM does; leaves,
joins: an engine, as its operator asks."""
Damage = Literal["truncated", "random bytes", "missing", "empty", "foreign file", "unfinished", "growing file"]
"""growing file: a byte of one of the run's own, which checkpoints speak of, is another."""

_OF_ANY: tuple[What, ...] = ("stands still", "is slow")
_OF_ENGINES: tuple[What, ...] = ("engine dies", "loses weights", "leaves", "joins")
DAMAGES: tuple[Damage, ...] = (
    "truncated",
    "random bytes",
    "missing",
    "empty",
    "foreign file",
    "unfinished",
    "growing file",
)


@dataclass(frozen=True)
class Fault:
    """A fault of an attempt. turn: of the event loop of the attempt; whom: a number, from which follows one of those to
    whom it can happen; size: from 0 to 1, how long, how slow or how often."""

    turn: int
    what: What
    whom: int
    size: float


@dataclass(frozen=True)
class AttemptFaults:
    """The faults of an attempt. damaged: what happens to the newest checkpoint, or its files, before the next
    attempt."""

    faults: tuple[Fault, ...]
    damaged: tuple[Damage, ...] = ()


def draw_faults(random: Random, turns: int) -> list[AttemptFaults]:
    """Faults of a run that takes so many turns if nothing happens. The last attempt is not ended by any."""
    attempts = [_attempt(random, turns, ending=True) for _ in range(random.choice((0, 1, 2, 3, 4, 6)))]
    return [*attempts, _attempt(random, turns, ending=False)]


def _attempt(random: Random, turns: int, *, ending: bool) -> AttemptFaults:
    count = random.choice((0, 2, 4, 8, 12, 20))
    faults = [_fault(random, turns, random.choice((*_OF_ANY, *_OF_ENGINES))) for _ in range(count)]
    damaged: list[Damage] = []
    if ending:
        end: What = random.choice(("cut", "cut", "cut", "dies", "asked to leave"))
        faults.append(_fault(random, turns, end, whom=random.choice((0, 1, 2, 3, 4))))
        damaged = [random.choice(DAMAGES) for _ in range(random.choice((0, 0, 1, 2)))]
    return AttemptFaults(tuple(sorted(faults, key=lambda fault: fault.turn)), tuple(damaged))


def _fault(random: Random, turns: int, what: What, whom: int | None = None) -> Fault:
    return Fault(random.randint(1, turns), what, random.randrange(16) if whom is None else whom, random.random())
