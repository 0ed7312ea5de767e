"""`make compare`: from the command line to runs, tables and a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.comparison_order import Order, compare_order
from harness.comparison.experiment import Campaign, ListedCell, common_seeds, read_campaign, write_campaign
from harness.comparison.fairness import fairness_key, first_difference, refuse_unequal
from harness.comparison.running.cells import JobCell, LeftOut, lay_out_all
from harness.comparison.running.conclusion import conclude
from harness.comparison.running.gate import gate_job, passed_before, run_gate
from harness.comparison.running.outlook import machine_warnings, print_failures, print_outlook
from harness.comparison.running.running import Command, Runs, bench_command, run_cells
from harness.config import ConfigError
from harness.config.compose import plain
from harness.config.machine import Machine, this_machine


def run(arguments: Sequence[str], results: Path, console: Console, command: Command = bench_command) -> int:
    """Compare schedules: `schedules=all` or names with commas, `dry=true`, and settings of the job.

    Returns the exit code: 1 where a run failed, the gate did, or a ledger does not close.
    """
    machine = this_machine()
    return carry_out(compare_order(arguments, machine), machine, results, console, command)


def carry_out(order: Order, machine: Machine, results: Path, console: Console, command: Command) -> int:
    """Say what will be done, run the gate and what is not done yet, and compare."""
    folder = results / order.experiment
    before = read_campaign(folder)
    known = {} if before is None else before.settings_of({cell.label: cell.settings for cell in order.wanted})
    with console.status("laying out the cells"):
        cells, left_out = lay_out_all(order.wanted, known, machine)
    campaign = _campaign(order, cells, left_out, machine_warnings(cells, machine))
    _refuse_another(before, campaign, folder)
    gate = gate_job(cells[0], order.shared)
    runs = Runs(tuple(cells), order.seeds, results, order.force)
    gate_due = passed_before(gate, results) is None
    print_outlook(runs, left_out, campaign.warnings, gate_due, console)
    if order.dry:
        return 0
    write_campaign(folder, campaign)
    run_gate(gate, results, machine, console, command)
    outcome = run_cells(runs, console, command)
    print_failures(outcome.failed, console)
    if outcome.failed and not common_seeds(folder, campaign):
        return 1
    return 0 if conclude(folder, campaign, console) and not outcome.failed else 1


def _campaign(
    order: Order,
    cells: Sequence[JobCell],
    left_out: Sequence[LeftOut],
    warnings: Sequence[str],
) -> Campaign:
    """Raises ConfigError where its cells may not be compared: that is known before any has run."""
    keys = {cell.label: fairness_key(plain(cell.config), (), order.axes) for cell in cells}
    refuse_unequal(keys)
    given = {cell.label: cell.settings for cell in order.wanted}
    return Campaign(
        axes=order.axes,
        key=keys[cells[0].label],
        seeds=order.seeds,
        cells=tuple(ListedCell(cell.label, cell.name, given[cell.label], cell.settings, cell.pools) for cell in cells),
        left_out={cell.label: cell.why for cell in left_out},
        warnings=tuple(warnings),
    )


def _refuse_another(before: Campaign | None, now: Campaign, folder: Path) -> None:
    """One folder holds one comparison: cells of two would stand in one report."""
    if before is None:
        return
    fix = "give this one a folder of its own, EXPERIMENT=another_name"
    if before.axes != now.axes:
        theirs, ours = (", ".join(its.axes) for its in (before, now))
        raise ConfigError(f"{folder} holds a comparison along {theirs}, this one is along {ours}; {fix}")
    differing = first_difference(before.key, now.key)
    if differing is not None:
        name, theirs, ours = differing
        raise ConfigError(f"{folder} holds a comparison with {name}={theirs}, this one has {name}={ours}; {fix}")
