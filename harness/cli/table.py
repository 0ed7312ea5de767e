"""`make table`: every schedule under twelve conditions on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.config import ConfigError


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Simulate every schedule under twelve conditions, and write docs/schedule_table.md."""
    from harness.studies.schedule_table import write_page

    if arguments:
        raise ConfigError(f"{arguments[0]} changes nothing: `make table` has no settings")
    with console.status("simulating") as status:
        path = write_page(lambda said: status.update(f"simulating: {said}"))
    console.print(f"{path}", highlight=False)
    return 0
