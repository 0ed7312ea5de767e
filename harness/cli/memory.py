"""`make memory`: what lies on the devices of five machines under every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Plan the memory of three models on five machines under every schedule, and write docs/gpu_memory.md."""
    from harness.planner.memory import write_page

    with console.status("planning") as status:
        path = write_page(lambda said: status.update(f"planning: {said}"))
    console.print(f"{path}", highlight=False)
    return 0
