"""`make scaling`: every schedule planned for 32 to 1,024 devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Plan every schedule for 32 to 1,024 devices, and write docs/scaling.md."""
    from harness.cli.steps import StepsBar
    from harness.studies.scaling import write_study

    with StepsBar("planning", console) as steps:
        path = write_study(results, steps.done)
    console.print(f"{path}", highlight=False)
    return 0
