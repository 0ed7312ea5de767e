"""A paper experiment's result on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from harness.studies.papers.result import Result, Table
from harness.studies.papers.tables import overview, tables_of


def show(result: Result, console: Console) -> None:
    """Print what is compared, at what scale, the figures, and what is missing."""
    its = result.experiment
    console.print(f"\n{its.title}", style="bold", highlight=False)
    for told in (its.source, its.compares, f"scale: {its.scale}"):
        _line(told, console)
    for table in tables_of(result):
        print_table(table, console)
    for told in (*result.notes, *(f"missing: {missing}" for missing in its.missing)):
        _line(told, console)


def show_overview(results: Sequence[Result], console: Console) -> None:
    """Print the predictions of all."""
    print_table(overview(results), console)


def print_table(table: Table, console: Console) -> None:
    """The first column and words to the left, figures to the right."""
    shown = RichTable(title=f"\n{table.title}", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for number, name in enumerate(table.columns):
        words = number == 0 or all(not any(map(str.isdigit, row[number])) for row in table.rows)
        shown.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown, markup=False)


def _line(told: str, console: Console) -> None:
    console.print(told, highlight=False, markup=False)
