"""`make table`: every schedule under twelve conditions on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Simulate every schedule under twelve conditions, and write docs/schedule_table.md."""
    from harness.studies.schedule_table import write_page

    with console.status("simulating") as status:
        path = write_page(lambda said: status.update(f"simulating: {said}"))
    console.print(f"{path}", highlight=False)
    return 0
