"""`make sweep`: a comparison along settings that have several values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.campaigns.cells import swept_cells
from harness.campaigns.pipeline import ComparisonRequest, comparison_request, run_comparison
from harness.cli.arguments import comparison_arguments, is_asked_for
from harness.cli.forked_runs import ForkedRuns
from harness.config import ConfigError
from harness.config.machine import Machine
from harness.runtime.runtime import machine_of_runs


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Compare along settings that have several values, `name=value,value`; `dry=true`. Returns the exit code."""
    machine = machine_of_runs()
    with ForkedRuns(at_once="dry=true" not in arguments) as runs:
        return run_comparison(sweep_request(arguments, machine), machine, results, console, runs.start)


def sweep_request(arguments: Sequence[str], machine: Machine) -> ComparisonRequest:
    """A cell per combination of values. Raises ConfigError for what cannot be read, and where no setting has two."""
    own, settings = comparison_arguments(arguments)
    if any(setting.startswith("schedules=") for setting in settings):
        raise ConfigError('SCHEDULES is for `make compare`; sweep them as ARGS="schedule=colocate_sync,fully_async"')
    axes, cells = swept_cells(settings)
    if not axes:
        raise ConfigError('nothing to sweep; give a setting several values: ARGS="schedule.max_staleness=0,1,2,4,8"')
    shared = [setting for setting in settings if setting.partition("=")[0].lstrip("+~") not in axes]
    return comparison_request("sweep", axes, cells, shared, machine, dry=is_asked_for("dry", own))
