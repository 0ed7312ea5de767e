"""Faults of a run, drawn from a seed: what happens, to whom, and as which turn of its event loop; files of its
checkpoints that are damaged between two attempts; and what is checked of it afterwards."""

import os
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from harness.comparison.promises import FinishedRun, broken_promises, read_finished
from harness.config.compose import make_schedule
from harness.config.transports import transport_of
from harness.driver.checkpoint_files import CHECKPOINTS, DRIVER, Cut
from harness.metrics.run_files import load_metrics

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
    """The faults of an attempt. damaged: what happens to the newest checkpoint before the next attempt."""

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


Damaged = dict[str, int]
"""Checkpoints by name, with the time of their folder after that: another one of this name is whole."""


def version_of(checkpoint: Path) -> int:
    """The version of a checkpoint's folder."""
    return int(checkpoint.name.rpartition("-")[2])


def whole_checkpoints(run: Path, damaged: Damaged) -> list[Path]:
    """Checkpoints of a run's folder that nothing was done to, the newest last."""
    return [path for path in _all(run) if damaged.get(path.name) != path.stat().st_mtime_ns]


def damaged_checkpoints(run: Path, damaged: Damaged) -> list[Path]:
    """Checkpoints of a run's folder that were damaged and not written anew since."""
    return [path for path in _all(run) if damaged.get(path.name) == path.stat().st_mtime_ns]


def _all(run: Path) -> list[Path]:
    return sorted((run / CHECKPOINTS).glob("version-*"))


def damage(checkpoint: Path, what: Damage, random: Random, damaged: Damaged) -> str:
    """Damage one file of a checkpoint, or all of it; returns a line on what was done."""
    if what == "growing file":
        return _damage_growing(checkpoint, random, damaged)
    if what == "unfinished":
        checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}"))
        return f"{checkpoint.name} has no name yet"
    if what == "foreign file":
        (checkpoint / "foreign").write_bytes(b"of another run")
        told = f"{checkpoint.name} has a foreign file"
    else:
        path = random.choice([path for path in sorted(checkpoint.rglob("*")) if path.is_file()])
        _damage_file(path, what, random)
        told = f"{path.relative_to(checkpoint.parent)}: {what}"
    damaged[checkpoint.name] = checkpoint.stat().st_mtime_ns
    return told


def _damage_growing(checkpoint: Path, random: Random, damaged: Damaged) -> str:
    """All checkpoints that speak of the byte are damaged by it."""
    run = checkpoint.parent.parent
    cuts = {path: (path / DRIVER).read_bytes() for path in whole_checkpoints(run, damaged)}
    sizes = {path: msgspec.json.decode(cut, type=Cut).files for path, cut in cuts.items()}
    name = random.choice([name for name, size in sorted(sizes[checkpoint].items()) if size])
    at = random.randrange(sizes[checkpoint][name])
    data = bytearray((run / name).read_bytes())
    data[at] ^= random.randint(1, 255)
    (run / name).write_bytes(data)
    for path, its in sizes.items():
        if its.get(name, 0) > at:
            damaged[path.name] = path.stat().st_mtime_ns
    return f"{name}: another byte"


def _damage_file(path: Path, what: Damage, random: Random) -> None:
    data = path.read_bytes()
    if what == "missing":
        path.unlink()
    elif what == "empty" or not data:
        os.truncate(path, 0)
        if not data:  # it was empty before
            path.write_bytes(b"\0")
    elif what == "truncated":
        os.truncate(path, random.randrange(len(data)))
    else:
        at = random.randrange(len(data))
        changed = bytes([data[at] ^ random.randint(1, 255)])
        path.write_bytes(data[:at] + changed + data[at + 1 :])


def finished_with(folder: Path) -> tuple[FinishedRun, list[str]]:
    """The run, and what is wrong with it: promises of its schedule, and iterations that are missing or there twice."""
    run = read_finished(folder)
    problems = broken_promises(run, newer=transport_of(make_schedule(run.config).transport).staged)
    if (found := [line["iteration"] for line in load_metrics(folder)]) != list(range(run.config.iterations)):
        problems.append(f"metrics.jsonl has iterations {found}")
    return run, problems
