"""`make calibrate`: costs from finished real runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.config import ConfigError


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Fit costs to finished real runs, and write them as a file of settings."""
    from harness.calibration.fitting import explained, write_costs
    from harness.calibration.runs import base_job, calibrate_runs

    own, settings = own_arguments(arguments, "run", "name")
    if not own["run"]:
        raise ConfigError('which run? RUN=results/bench/<cell>/seed=0, or several: RUN="one another"')
    fitted = calibrate_runs([Path(run) for run in own["run"]], base_job(settings), *own["name"][-1:])
    path = write_costs(results / "costs", fitted, [f"Fitted to {' and '.join(own['run'])}."])
    print_costs(path, explained(fitted), console)
    return 0


def print_costs(path: Path, explained: Sequence[str], console: Console) -> None:
    """Print what was fitted, and the command that uses it."""
    for line in explained:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(f"\n{path}\nmake bench BACKEND=virtual COST={path}", highlight=False, soft_wrap=True, markup=False)
