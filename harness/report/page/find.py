"""Which runs a report is about: an experiment's folder, or one of its cells."""

from __future__ import annotations

from pathlib import Path

from harness.comparison.equivalence import GATE_RUNS
from harness.comparison.experiment import comparison_of, read_campaign
from harness.comparison.parts import Cell
from harness.comparison.result import Comparison, compare
from harness.comparison.runs import Run, runs_in
from harness.config import ConfigError


def folder_of(named: str | None, results: Path) -> Path:
    """The folder of an experiment in `results`, or a path; None: the experiment of which a run finished last.

    Raises ConfigError if there is no such folder.
    """
    folders = [folder for folder in sorted(results.glob("*")) if not folder.name.endswith(GATE_RUNS)]
    finished = {folder: list(folder.glob("*/seed=*/DONE")) for folder in folders}
    last = {folder: max(done.stat().st_mtime for done in its) for folder, its in finished.items() if its}
    if named is None and last:
        return max(last, key=lambda folder: last[folder]).resolve()
    for folder in () if named is None else (results / named, Path(named)):
        if folder.is_dir():
            return folder.resolve()
    there = f"{results} has {', '.join(folder.name for folder in last) if last else 'no finished run yet'}"
    if named is None:
        raise ConfigError(f"{there}; make one with `make compare`")
    raise ConfigError(f"EXPERIMENT={named} is neither an experiment with results nor a folder; {there}")


def comparison_in(folder: Path) -> Comparison:
    """What stands in the folder of an experiment: what `make compare` or `make sweep` was asked for, else a cell
    per folder of runs, compared by schedule.

    Raises ConfigError where no run is finished, for smoke runs, and for cells that must not be compared.
    """
    campaign = read_campaign(folder)
    if campaign is not None:
        return comparison_of(folder, campaign)
    by_cell: dict[Path, list[Run]] = {}
    for run in runs_in(folder):
        by_cell.setdefault(run.path.parent, []).append(run)
    if not by_cell:
        raise ConfigError(f"{folder} has no finished run: a run that is done has a file DONE")
    return compare(_labelled(by_cell))


def _labelled(by_cell: dict[Path, list[Run]]) -> list[Cell]:
    """By schedule; by the name of their folder where two have the same."""
    schedules = [runs[0].identity.schedule for runs in by_cell.values()]
    return [
        Cell(path.name, schedule if schedules.count(schedule) == 1 else path.name, tuple(_by_seed(runs)))
        for (path, runs), schedule in zip(by_cell.items(), schedules, strict=True)
    ]


def _by_seed(runs: list[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: run.identity.seed)
