"""What a paper experiment is run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console


def _silent(said: str) -> None:
    pass


@dataclass(frozen=True)
class Surroundings:
    """results: the folder that runs are written to and found in; processes: how many simulate side by side; told:
    hears what is being done; console: for runs that show their own progress."""

    results: Path
    console: Console
    processes: int = 1
    told: Callable[[str], None] = _silent
