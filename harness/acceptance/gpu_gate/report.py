"""The gate's results as a page of Markdown, and as lines for a console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.acceptance.gpu_gate.results import PartResult, passed
from harness.metrics.atomic_files import write_text

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
