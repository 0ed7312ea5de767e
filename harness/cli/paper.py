"""`make paper`: from the command line to tables and pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.cli.forked_runs import ForkedRuns
from harness.cli.steps import working
from harness.config import ConfigError
from harness.report.page.document import print_written
from harness.studies.papers.experiment import Context, names
from harness.studies.papers.run import run_papers


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Run the experiment that is named, or all; print what was written. Raises ConfigError where none is named."""
    own, _ = own_arguments(arguments, "paper")
    if not own["paper"]:
        raise ConfigError(f"which? paper=all, or one of {', '.join(names())}")
    with working("reading", console) as show, ForkedRuns() as runs:
        context = Context(results, console, runs.start, processes=os.cpu_count() or 1, progress=show)
        paths = run_papers(own["paper"][-1], context)
    print_written(paths, console)
    return 0
