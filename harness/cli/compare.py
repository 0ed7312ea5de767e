"""`make compare`, `sweep`, `matrix`: schedules, settings, and off-policy corrections side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from harness.campaigns.cells import (
    CellRequest,
    correction_axes,
    named_corrections,
    refuse_overridden,
    schedule_cells,
    swept_cells,
)
from harness.campaigns.pipeline import ComparisonRequest, comparison_request, run_comparison
from harness.cli.arguments import comparison_arguments, is_asked_for, share_of
from harness.cli.forked_runs import ForkedRuns
from harness.comparison.correction_matrix import matrix_of, write_matrix
from harness.comparison.experiment import common_seeds, comparison_of, read_campaign
from harness.comparison.statistics import MARGIN
from harness.comparison.thresholds import read_thresholds
from harness.config import ConfigError
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import Machine
from harness.config.registries import check_name
from harness.report.page.document import print_written
from harness.report.page.pictures import draw_matrix
from harness.runtime.runtime import machine_of_runs


def compare(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Compare schedules: `schedules=all` or names with commas (`fully_async@4`: at that `max_staleness`), `dry=true`,
    and settings of the job. Returns the exit code: 1 where a run failed, the gate did, or a ledger does not close, 3
    beyond a threshold."""
    machine = machine_of_runs()
    with ForkedRuns() as runs:
        return run_comparison(compare_request(arguments, machine), machine, results, console, runs.start)


def compare_request(arguments: Sequence[str], machine: Machine) -> ComparisonRequest:
    """A cell per schedule; `schedules=all` by default. Raises ConfigError for what cannot be read."""
    own, settings = comparison_arguments(arguments, "schedules")
    if any(setting.startswith("schedule=") for setting in settings):
        raise ConfigError("`cadence compare` runs several schedules: schedules=all, or schedules=fully_async,half_step")
    cells = schedule_cells(own.get("schedules", "all"), settings)
    return _request("compare", ("schedule",), cells, settings, machine, own)


def _request(
    command: str,
    axes: tuple[str, ...],
    cells: Sequence[CellRequest],
    settings: Sequence[str],
    machine: Machine,
    own: Mapping[str, str],
) -> ComparisonRequest:
    """own: arguments of the command itself. Raises ConfigError for a margin or a threshold that is none."""
    margin = share_of("margin", own) or MARGIN
    thresholds = read_thresholds(own.get("fail_if", ""))
    dry = is_asked_for("dry", own)
    return comparison_request(command, axes, cells, settings, machine, dry=dry, margin=margin, thresholds=thresholds)


def sweep(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Compare along settings that have several values, `name=value,value`; `dry=true`. Returns the exit code."""
    machine = machine_of_runs()
    with ForkedRuns() as runs:
        return run_comparison(sweep_request(arguments, machine), machine, results, console, runs.start)


def sweep_request(arguments: Sequence[str], machine: Machine) -> ComparisonRequest:
    """A cell per combination of values. Raises ConfigError for what cannot be read, and where no setting has two."""
    own, settings = comparison_arguments(arguments)
    if any(setting.startswith("schedules=") for setting in settings):
        raise ConfigError("schedules= is for `cadence compare`; sweep them as schedule=colocate_sync,fully_async")
    axes, cells = swept_cells(settings)
    if not axes:
        raise ConfigError("nothing to sweep; give a setting several values: schedule.max_staleness=0,1,2,4,8")
    shared = [setting for setting in settings if setting.partition("=")[0].lstrip("+~") not in axes]
    return _request("sweep", axes, cells, shared, machine, own)


_SCHEDULES = "fully_async,half_step,one_step_off"
_STALENESS = "0,1,2,4"
_CORRECTIONS = "none,clip,decoupled,tis,mis"
_STALENESS_OPTION = "max_staleness"

_SHARED = (
    "backend=real",
    "cluster.devices=3",
    "cluster.oversubscribe=true",
    "schedule.split.rollout=2",
    "schedule.split.actor=1",
)
"""Rewards are wanted, which only real runs have; times are not, so devices may share cores. Two engines and one trainer
are the least that all its schedules run on. Recomputed
log-probs stay on for all: decoupled needs them, and fair is what is equal."""


def matrix(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Run what is not done yet of the matrix, compare it, and write it into its folder, as tables and as pictures.
    arguments: `schedules=`, `staleness=`, `corrections=` (lists with commas), `dry=true`, and settings of all jobs.
    Returns the exit code: 1 where a run failed, the gate did, or a ledger does not close."""
    machine, results = machine_of_runs(), results.resolve()
    with ForkedRuns() as runs:
        request = matrix_request(arguments, machine)
        code = run_comparison(request, machine, results, console, runs.start)
    folder = results / request.experiment
    campaign = read_campaign(folder)
    if request.dry or campaign is None or not common_seeds(folder, campaign):
        return code
    found = matrix_of(comparison_of(folder, campaign))
    print_written([*write_matrix(folder, found), *draw_matrix(folder, found)], console)
    return code


def matrix_request(arguments: Sequence[str], machine: Machine) -> ComparisonRequest:
    """A cell for each schedule, at each staleness where that is an option of it, under each correction; the least stale
    first. Raises ConfigError for what cannot be read."""
    own, settings = comparison_arguments(arguments, "schedules", "staleness", "corrections")
    settings = [*_SHARED, *settings]
    corrections = named_corrections(own.get("corrections", _CORRECTIONS))
    refuse_overridden(corrections, settings)
    names = _schedules(own.get("schedules", _SCHEDULES))
    rows = [row for name in names for row in _rows(name, own.get("staleness", _STALENESS))]
    cells = [
        CellRequest(f"{row.label}, {correction.label}", (*row.settings, *correction.settings, *settings))
        for row in sorted(rows, key=lambda row: make_schedule(compose_job((*row.settings, *settings))).eta)
        for correction in corrections
    ]
    return _request("matrix", ("schedule", *correction_axes()), cells, settings, machine, own)


def _rows(schedule: str, staleness: str) -> list[CellRequest]:
    chosen = f"schedule={schedule}"
    if _STALENESS_OPTION not in compose_job([chosen]).schedule.options:
        return [CellRequest(schedule, (chosen,))]
    values = [value.strip() for value in staleness.split(",")]
    return [
        CellRequest(f"{schedule} {value}", (chosen, f"schedule.{_STALENESS_OPTION}={value}"))
        for value in dict.fromkeys(values)
    ]


def _schedules(listed: str) -> list[str]:
    names = [part.strip() for part in listed.split(",")]
    for name in names:
        check_name("schedule", name, "schedules")
    return list(dict.fromkeys(names))
