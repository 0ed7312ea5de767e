"""What stands at the end of a comparison: tables, the gate, the account of every sample, a report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from harness.comparison.console import print_comparison
from harness.comparison.experiment import Campaign, comparison_of
from harness.report.page.document import write_report


def conclude(folder: Path, campaign: Campaign, console: Console) -> bool:
    """Compare what is finished, print it, write its report. Returns whether the gate and every ledger were in order."""
    comparison = comparison_of(folder, campaign)
    print_comparison(comparison, console)
    for path in write_report(comparison, folder):
        console.print(f"{path}", soft_wrap=True, highlight=False, markup=False)
    gate, conservation = comparison.gate, comparison.conservation
    return gate is not None and gate.passed and conservation is not None and conservation.passed
