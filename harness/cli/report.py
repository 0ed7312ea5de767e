"""`make report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Write one page of what the runs of an experiment say of each other, and the same in Markdown."""
    from harness.comparison.experiment import comparison_in, folder_of
    from harness.report.page.document import print_written, write_report

    own, _ = own_arguments(arguments, "experiment")
    folder = folder_of(own["experiment"][-1] if own["experiment"] else None, results)
    print_written(write_report(comparison_in(folder), folder), console)
    return 0
