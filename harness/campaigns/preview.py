"""Texts that are printed before runs begin, and on those that failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from harness.campaigns.cells import ResolvedCell, SkippedCell
from harness.campaigns.execution import FailedRun, Runs, time_text
from harness.config.machine import Machine
from harness.driver.progress import print_banner

GATE_S = 40.0
"""Seconds that the runs of an equivalence gate take together, roughly, the first warm start included."""


def machine_warnings(cells: Sequence[ResolvedCell], machine: Machine) -> list[str]:
    """Facts about this machine that make times of these cells doubtful."""
    plan, cluster = cells[0].plan, cells[0].config.cluster
    if plan.backend == "virtual":
        return []
    warnings = []
    needed = max(cell.plan.placement.total for cell in cells) * cluster.threads_per_device
    if not plan.gpu and needed > machine.cores:
        warnings.append(
            f"{needed} cores are wanted and {machine.cores} are there: devices share cores, so that no time here is to "
            "be trusted; what is learnt per sample is"
        )
    return warnings


def print_preview(
    runs: Runs,
    skipped: Iterable[SkippedCell],
    said: Iterable[str],
    gate_due: bool,
    console: Console,
) -> None:
    """Every cell with its devices and seeds, what cannot run and why, other lines of the cells, and how long all of it
    will take."""
    plan = runs.cells[0].plan
    if plan.backend != "real":
        print_banner(plan, console)
    if any(cell.planned for cell in runs.cells):
        _say(console, "Splits and layouts are the planner's, one for each cell.", "yellow")
    estimate = runs.estimate()
    pending = runs.to_do()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("cell", "devices", "seeds done", "seeds to run", "a run takes"):
        table.add_column(heading, overflow="fold")
    for cell in runs.cells:
        due = [seed for seed in runs.seeds if (cell, seed) in pending]
        done = [seed for seed in runs.seeds if seed not in due]
        table.add_row(cell.label, cell.pools, _listed(done), _listed(due), time_text(estimate.of(cell)))
    console.print(table)
    for left_out in skipped:
        _say(console, f"{left_out.label} is left out: {left_out.why}", "yellow")
    for line in said:
        _say(console, line, "yellow")
    left = estimate.left([cell for cell, _ in pending], [], runs.at_once)
    if gate_due and left is not None:
        left += GATE_S
    what = f"{len(pending)} of {len(runs.all)} runs to do" + (", and the equivalence gate" if gate_due else "")
    _say(console, f"{what}: {time_text(left)}" if pending or gate_due else "all runs are done already", "bold")


def print_failures(failed: Iterable[FailedRun], console: Console) -> None:
    """Print which runs failed, with the end of each log and where the rest of it is."""
    for failure in failed:
        _say(console, f"{failure.label} seed {failure.seed} {failure.how}; its log is {failure.log}", "bold red")
        _say(console, "\n".join(f"  {line}" for line in failure.log_tail.splitlines()), "red")


def _listed(seeds: Sequence[int]) -> str:
    return " ".join(str(seed) for seed in seeds) or "-"


def _say(console: Console, line: str, style: str) -> None:
    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
