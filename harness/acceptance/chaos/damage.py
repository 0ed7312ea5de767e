"""Files of a run's checkpoints that are damaged between two attempts."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import msgspec

from harness.acceptance.chaos.faults import Damage
from harness.driver.checkpoint_files import CHECKPOINTS, DRIVER, Cut

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
    sizes = {path: _sizes(path) for path in whole_checkpoints(run, damaged)}
    name = random.choice([name for name, size in sorted(sizes[checkpoint].items()) if size])
    at = random.randrange(sizes[checkpoint][name])
    data = bytearray((run / name).read_bytes())
    data[at] ^= random.randint(1, 255)
    (run / name).write_bytes(data)
    for path, its in sizes.items():
        if its.get(name, 0) > at:
            damaged[path.name] = path.stat().st_mtime_ns
    return f"{name}: another byte"


def _sizes(checkpoint: Path) -> dict[str, int]:
    return msgspec.json.decode((checkpoint / DRIVER).read_bytes(), type=Cut).files


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
