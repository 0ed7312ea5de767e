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
    """The result of a part. why: where it did not pass. seconds: of the whole part, its process's start included."""

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


REPORT = "gate.md"


def lines(result: PartResult) -> list[str]:
    """Lines on one part, for a console."""
    checks = [f"    {'ok ' if check.passed else 'NO '} {check.what}: {check.found}" for check in result.checks]
    why = [f"    {result.why}"] if result.why else []
    return [f"{result.part}: {result.status}, {result.seconds:.1f} s", *checks, *why]


def summary(results: Sequence[PartResult]) -> str:
    """One line, such as: 8 of 10 parts passed, 2 left out (engines, bench); 241 s."""
    by_status: dict[str, list[str]] = {}
    for result in results:
        by_status.setdefault(result.status, []).append(result.part)
    good = len(by_status.pop("passed", []))
    others = [f"{len(names)} {status} ({', '.join(names)})" for status, names in by_status.items()]
    seconds = sum(result.seconds for result in results)
    return f"{', '.join([f'{good} of {len(results)} parts passed', *others])}; {seconds:.0f} s"


def write_report(folder: Path, device: str, results: Sequence[PartResult]) -> Path:
    """gate.md beside the results: a table of parts, and below it what each found."""
    table = [
        "| part | outcome | s | checks |",
        "|---|---|---:|---:|",
        *(f"| {result.part} | {result.status} | {result.seconds:.1f} | {len(result.checks)} |" for result in results),
    ]
    found: list[str] = []
    for result in results:
        found += ["", f"## {result.part}: {result.status}", ""]
        found += [result.why, ""] * bool(result.why)
        if result.checks:
            found += ["| | | |", "|---|---|---|"]
            found += [
                f"| {check.what} | {check.found} | {'ok' if check.passed else '**no**'} |" for check in result.checks
            ]
    outcome = "passed" if passed(results) else "did not pass"
    page = [f"# The gate on {device}: {outcome}", "", summary(results), "", *table, *found]
    write_text(folder / REPORT, "\n".join(page) + "\n")
    return folder / REPORT
