"""Results of the gate's parts: a file of JSON for each, written anew whenever there is more in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from harness.metrics.atomic_files import write_text

Status = Literal["running", "passed", "failed", "crashed", "timed out", "left out"]


class LeftOut(Exception):
    """A part, or the rest of it, cannot be asked of this machine; says what is missing."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. found: the figures, with units."""

    what: str
    found: str
    passed: bool = True


@dataclass(frozen=True)
class PartResult:
    """why: where it did not pass. seconds: of the whole part, its process's start included."""

    part: str
    status: Status = "running"
    seconds: float = 0.0
    checks: tuple[Check, ...] = ()
    why: str = ""

    def ended(self, status: Status, seconds: float, why: str = "") -> PartResult:
        """The result of a part that has ended."""
        return replace(self, status=status, seconds=round(seconds, 1), why=why)


def result_path(folder: Path, part: str) -> Path:
    """The file of a part's result."""
    return folder / f"{part}.json"


def write_result(folder: Path, result: PartResult) -> None:
    """Write a part's result as JSON."""
    write_text(result_path(folder, result.part), json.dumps(asdict(result), indent=1) + "\n")


def read_result(folder: Path, part: str) -> PartResult | None:
    """None where the part has not begun."""
    path = result_path(folder, part)
    if not path.exists():
        return None
    tree = json.loads(path.read_text(encoding="utf-8"))
    return PartResult(**tree | {"checks": tuple(Check(**check) for check in tree["checks"])})


def passed(results: Sequence[PartResult]) -> bool:
    """Whether every part that ran passed, and one did."""
    ran = [result for result in results if result.status != "left out"]
    return bool(ran) and all(result.status == "passed" for result in ran)
