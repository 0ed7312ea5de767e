"""Promises that are checked of a run that faults happened to, once it came to its end, on either clock."""

from __future__ import annotations

from pathlib import Path

from harness.comparison.promises import FinishedRun, broken_promises, read_finished
from harness.config.compose import make_schedule
from harness.config.transports import transport_of
from harness.metrics.run_files import load_metrics


def finished_with(folder: Path) -> tuple[FinishedRun, list[str]]:
    """The run, and what is wrong with it: promises of its schedule, and iterations that are missing or there twice."""
    run = read_finished(folder)
    problems = broken_promises(run, newer=transport_of(make_schedule(run.config).transport).staged)
    if (found := [line["iteration"] for line in load_metrics(folder)]) != list(range(run.config.iterations)):
        problems.append(f"metrics.jsonl has iterations {found}")
    return run, problems
