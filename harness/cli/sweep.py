"""`make sweep`: a comparison along settings that have several values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.compare import carry_out
from harness.cli.comparison_order import sweep_order
from harness.comparison.running.running import Command, bench_command
from harness.config.machine import this_machine


def run(arguments: Sequence[str], results: Path, console: Console, command: Command = bench_command) -> int:
    """Compare along settings that have several values, `name=value,value`; `dry=true`. Returns the exit code."""
    machine = this_machine()
    return carry_out(sweep_order(arguments, machine), machine, results, console, command)
