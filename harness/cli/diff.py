"""`make diff`, `cadence diff A B`: what changed between two experiments, or two commits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from harness.cli.arguments import last_values, own_arguments
from harness.config import ConfigError

if TYPE_CHECKING:
    from harness.comparison.changes import Changes
    from harness.comparison.runs import Cell

_COMMIT = re.compile(r"[0-9a-f]{7,40}")


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Each an experiment in the results, a folder of runs, or the beginning of a commit, whose runs may be in any
    experiment, smoke runs aside, as a gate's are. Returns 1 where a result got worse, or a ledger does not close."""
    from harness.comparison.changes import changes_between

    own, others = own_arguments(arguments, "before", "after")
    both = [*last_values(own).values(), *others]
    if len(both) != 2:
        raise ConfigError("diff takes two: cadence diff <before> <after>, experiments, folders, or commits")
    before, after = (_cells(named, results) for named in both)
    changes = changes_between(before, after)
    _print(changes, console)
    return 1 if changes.worse or not changes.conservation.passed else 0


def _print(changes: Changes, console: Console) -> None:
    """Print what is not the same, then of every cell its results, and of the rest what is called a difference."""
    from harness.comparison.changes import RESULTS
    from harness.comparison.measure_text import against, scale_of

    for line in changes.unlike or ("the same settings, code, packages and machine",):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "measure"):
        table.add_column(column)
    for column in ("before", "after", "change, 95 %"):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in changes.cells:
        for measure in cell.measures:
            text, scale = against(measure, 1), scale_of(measure)
            called = text is not None and text.verdict != "same"
            if called or measure.key in RESULTS:
                title = f"{measure.title} (%)" if scale.unit == "%" else measure.title
                change = "-" if text is None else f"{text.value.split()[0]} {text.bounds} {'*' if called else ' '}"
                table.add_row(cell.label, title, *(scale.value(each.value) for each in measure.cells), change)
    console.print(table)
    console.print("* significant difference, after Holm's correction for several cells", style="dim", highlight=False)
    for line in changes.unmatched:
        console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
    kept = changes.conservation
    for line in (kept.summary(), *kept.problems):
        console.print(line, style="" if kept.passed else "bold red", highlight=False, soft_wrap=True, markup=False)
    for line in changes.worse:
        console.print(f"worse: {line}", style="bold red", highlight=False, soft_wrap=True, markup=False)
    if not changes.worse:
        console.print("no result is called worse", style="bold", highlight=False)


def _cells(named: str, results: Path) -> list[Cell]:
    from harness.comparison.experiment import cells_in, labelled, named_folder
    from harness.comparison.runs import runs_in

    if (folder := named_folder(named, results)) is not None:
        return cells_in(folder)
    if _COMMIT.fullmatch(named):
        whole = [run for run in runs_in(results) if not run.identity.smoke]
        if of_commit := [run for run in whole if _commit(run.manifest.get("git")).startswith(named)]:
            return labelled(of_commit)
    raise ConfigError(f"{named} is no experiment in {results}, no folder, and no commit of a whole run there")


def _commit(git: dict[str, str] | None) -> str:
    return git["commit"] if git else ""
