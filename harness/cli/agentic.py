"""`make agentic`: every schedule with samples of several turns and slow tools, on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Simulate every schedule under four tool latencies, and write docs/agentic.md."""
    from harness.studies.tool_latency import write_page

    with console.status("simulating") as status:
        path = write_page(lambda said: status.update(f"simulating: {said}"))
    console.print(f"{path}", highlight=False, soft_wrap=True, markup=False)
    return 0
