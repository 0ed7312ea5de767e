"""A paper experiment's result as Markdown, with its picture."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.formatting import markdown_table
from harness.studies.papers.result import Result
from harness.studies.papers.tables import overview, tables_of


def markdown(result: Result, picture: str) -> str:
    """The whole file; picture: the name of a file beside it."""
    its = result.experiment
    parts = [
        f"# {its.title}",
        f"    make paper PAPER={its.name}",
        f"Source: {its.source}.",
        f"Compares {its.compares}.",
        f"Scale: {its.scale}.",
    ]
    for table in tables_of(result):
        parts += [f"**{table.title.capitalize()}**", markdown_table(table.columns, table.rows)]
    parts.append(f"![{its.title}]({picture})")
    if result.notes:
        parts.append("\n".join(f"- {note}" for note in result.notes))
    if its.missing:
        parts.append("Missing:\n\n" + "\n".join(f"- {missing}" for missing in its.missing))
    return "\n\n".join(parts) + "\n"


def overview_markdown(results: Sequence[Result]) -> str:
    """All predictions in one table, and where the experiments are."""
    pages = "\n".join(f"- [{its.experiment.title}]({its.experiment.name}.md)" for its in results)
    table = overview(results)
    parts = ["# Published experiments", "    make paper PAPER=all", pages, f"**{table.title.capitalize()}**"]
    return "\n\n".join([*parts, markdown_table(table.columns, table.rows)]) + "\n"
