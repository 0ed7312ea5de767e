"""`make compare`: schedules side by side on the same devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.campaigns.cells import schedule_cells
from harness.campaigns.pipeline import ComparisonRequest, comparison_request, run_comparison
from harness.cli.arguments import comparison_arguments, is_asked_for
from harness.cli.forked_runs import ForkedRuns
from harness.config import ConfigError
from harness.config.machine import Machine
from harness.runtime.runtime import machine_of_runs


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Compare schedules: `schedules=all` or names with commas, `dry=true`, and settings of the job.

    Returns the exit code: 1 where a run failed, the gate did, or a ledger does not close.
    """
    machine = machine_of_runs()
    with ForkedRuns(at_once="dry=true" not in arguments) as runs:
        return run_comparison(compare_request(arguments, machine), machine, results, console, runs.start)


def compare_request(arguments: Sequence[str], machine: Machine) -> ComparisonRequest:
    """A cell per schedule; `schedules=all` by default. Raises ConfigError for what cannot be read."""
    own, settings = comparison_arguments(arguments, "schedules")
    if any(setting.startswith("schedule=") for setting in settings):
        raise ConfigError("`make compare` runs several schedules: SCHEDULES=all, or SCHEDULES=fully_async,half_step")
    cells = schedule_cells(own.get("schedules", "all"), settings)
    return comparison_request("compare", ("schedule",), cells, settings, machine, dry=is_asked_for("dry", own))
