"""`make gate-gpu`: everything that only a machine shows, asked of it part by part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Run the parts that are missing; exit code 0 where every part that ran passed."""
    from harness.acceptance.gpu_gate import gate

    given, _ = own_arguments(arguments, "device", "parts", "force", "minutes")
    asked = gate.request({name: values[-1] for name, values in given.items() if values})
    return gate.run(asked, results, lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False))
