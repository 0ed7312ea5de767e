"""A comparison from request to conclusion: cells, equivalence gate, runs, verdict and report."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from harness.campaigns.cells import CellRequest, ResolvedCell, device_budget, distinct_cells, resolve_cells
from harness.campaigns.execution import Runs, StartRun, machine_warnings, print_failures, print_preview, run_cells
from harness.campaigns.gate import gate_job, passed_before, run_gate
from harness.comparison.console import print_comparison
from harness.comparison.experiment import (
    Campaign,
    ListedCell,
    common_seeds,
    comparison_of,
    read_campaign,
    write_campaign,
)
from harness.comparison.fairness import fairness_key, first_difference, refuse_unequal, shared_settings
from harness.comparison.statistics import MARGIN
from harness.comparison.thresholds import CROSSED, Threshold, crossed
from harness.config import ConfigError
from harness.config.compose import compose_job, plain
from harness.config.fields import checked_name
from harness.config.machine import Machine
from harness.metrics.formatting import say
from harness.metrics.run_files import refuse_changed_inputs
from harness.report.page.document import print_written, write_report

_OF_RUNS = ("seeds", "force")  # settings that say which runs of a cell are to be made, not what a cell is


@dataclass(frozen=True)
class ComparisonRequest:
    """The request of a comparison. axes: settings that differ on purpose. shared: what the user set for all cells.
    Neither has seeds among them. force: run again what is done. dry: only show what would run. margin: difference that
    does not matter, as a share. thresholds: beyond which the command fails. once: a line for each cell that stands for
    several."""

    axes: tuple[str, ...]
    cells: tuple[CellRequest, ...]
    shared: tuple[str, ...]
    experiment: str
    seeds: tuple[int, ...]
    force: bool
    dry: bool
    margin: float
    thresholds: tuple[Threshold, ...]
    once: tuple[str, ...] = ()


def comparison_request(
    command: str,
    axes: tuple[str, ...],
    cells: Sequence[CellRequest],
    shared: Sequence[str],
    machine: Machine,
    *,
    dry: bool,
    margin: float = MARGIN,
    thresholds: tuple[Threshold, ...] = (),
) -> ComparisonRequest:
    """The request of these cells, on devices that most of them can run on, in an experiment of their own unless
    `shared`, what the user set for all cells, names one."""
    chosen = compose_job([setting for setting in shared if _name_of(setting) in _OF_RUNS])
    kept, once = distinct_cells(cells, axes)
    budget = device_budget(kept, machine)
    asked, kept = (
        [CellRequest(cell.label, (*_without_runs(cell.settings), *budget)) for cell in of] for of in (cells, kept)
    )
    named = [setting.partition("=")[2] for setting in shared if _name_of(setting) == "experiment"]
    experiment = (
        checked_name("experiment", named[-1]) if named and named[-1] else _experiment_name(command, axes, asked)
    )
    return ComparisonRequest(
        axes=axes,
        cells=tuple(CellRequest(cell.label, (*cell.settings, f"experiment={experiment}")) for cell in kept),
        shared=(*_without_runs(shared), *budget),
        experiment=experiment,
        seeds=chosen.seed_list,
        force=chosen.force,
        dry=dry,
        margin=margin,
        thresholds=thresholds,
        once=tuple(once),
    )


def run_comparison(
    request: ComparisonRequest, machine: Machine, results: Path, console: Console, start: StartRun
) -> int:
    """Show what will be done; run the gate, then what is not done yet; compare. Returns the exit code: 1 where a run
    failed, the gate did, or a ledger does not close, 3 where a cell is beyond a threshold."""
    folder = results / request.experiment
    before = read_campaign(folder)
    known = {} if before is None else before.settings_of({cell.label: cell.settings for cell in request.cells})
    with console.status("preparing the cells"):
        cells, skipped = resolve_cells(request.cells, known, machine)
    campaign = _campaign(request, cells, skipped, machine_warnings(cells, machine))
    _refuse_another(before, campaign, folder)
    if not request.force:
        for cell in cells:
            refuse_changed_inputs(cell.config, [cell.folder(seed, results) for seed in request.seeds])
    gate = gate_job(cells[0], request.shared)
    runs = Runs(tuple(cells), request.seeds, results, request.force)
    gate_due = passed_before(gate, results) is None
    said = [*request.once, *(f"warning: {line}" for line in campaign.warnings)]
    print_preview(runs, skipped, said, gate_due, console)
    if request.dry:
        return 0
    write_campaign(folder, campaign)
    run_gate(gate, results, machine, console, start)
    outcomes = run_cells(runs, console, start)
    print_failures(outcomes.failed, console)
    if outcomes.failed and not common_seeds(folder, campaign):
        return 1
    code = conclude(folder, campaign, request.thresholds, console)
    return 1 if outcomes.failed else code


def conclude(folder: Path, campaign: Campaign, thresholds: Sequence[Threshold], console: Console) -> int:
    """Compare what is finished, print and report it. Returns 1 without a gate or a verdict, 3 beyond a threshold."""
    comparison = comparison_of(folder, campaign)
    print_comparison(comparison, console)
    print_written(write_report(comparison, folder), console)
    others = [index for index in range(len(comparison.cells)) if index != comparison.baseline]
    lines = crossed(thresholds, [(comparison.cells[one].label, comparison.measures, one) for one in others])
    for line in lines:
        say(console, line, "bold red")
    if comparison.gate is None or comparison.faults:
        return 1
    return CROSSED if lines else 0


def _campaign(
    request: ComparisonRequest, cells: Sequence[ResolvedCell], skipped: Mapping[str, str], warnings: Sequence[str]
) -> Campaign:
    """Raises ConfigError where its cells may not be compared: that is known before any has run."""
    keys = {cell.label: fairness_key(plain(cell.config), (), request.axes) for cell in cells}
    refuse_unequal(keys)
    key = {name: value for of_cell in keys.values() for name, value in of_cell.items()}
    given = {cell.label: cell.settings for cell in request.cells}
    return Campaign(
        axes=request.axes,
        key=key,
        seeds=request.seeds,
        cells=tuple(ListedCell(cell.label, cell.name, given[cell.label], cell.settings, cell.pools) for cell in cells),
        left_out=skipped,
        warnings=tuple(warnings),
        margin=request.margin,
    )


def _refuse_another(before: Campaign | None, now: Campaign, folder: Path) -> None:
    """Refuse another comparison in the same folder: cells of two would stand in one report."""
    if before is None:
        return
    fix = "give this one a folder of its own, experiment=another_name"
    if before.axes != now.axes:
        there, here = (", ".join(campaign.axes) for campaign in (before, now))
        raise ConfigError(f"{folder} holds a comparison along {there}, this one is along {here}; {fix}")
    differing = first_difference(before.key, now.key)
    if differing is not None:
        name, there, here = differing
        raise ConfigError(f"{folder} holds a comparison with {name}={there}, this one has {name}={here}; {fix}")


def _name_of(setting: str) -> str:
    return setting.partition("=")[0]


def _without_runs(settings: Sequence[str]) -> list[str]:
    return [setting for setting in settings if _name_of(setting) not in _OF_RUNS]


def _experiment_name(command: str, axes: Sequence[str], cells: Sequence[CellRequest]) -> str:
    """`compare-tiny-reverse-3fa2c1`: equal only where cells may be compared, so that no two comparisons mix."""
    errors = []
    for cell in cells:
        try:
            job = compose_job(cell.settings)
        except ConfigError as error:
            errors.append(error)
            continue
        digest = hashlib.sha256(json.dumps([*axes, shared_settings(job, axes)], sort_keys=True).encode()).hexdigest()[
            :6
        ]
        along = [] if command != "sweep" else [axis.rpartition(".")[2] for axis in axes]
        return "-".join([command, *along, job.model.name, job.task.name, digest])
    raise errors[0]
