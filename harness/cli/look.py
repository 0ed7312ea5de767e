"""`make list` and `make doctor`: what there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def show_choices(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Every choice of every group, with the first line of its file, and every paper experiment."""
    from harness.config.compose import EXPERIMENTS, GROUPS, choices
    from harness.studies.papers.experiment import names, read_experiment

    for group in GROUPS:
        console.print(f"{group}=", style="bold")
        for name in choices(group):
            path = EXPERIMENTS / group / f"{name}.yaml"
            first = path.read_text(encoding="utf-8").splitlines()[0]
            console.print(f"  {name:<16}{first.lstrip('# ')}", highlight=False, soft_wrap=True, markup=False)
    console.print("PAPER= (make paper)", style="bold")
    for name in names():
        console.print(f"  {name:<20}{read_experiment(name).title}", highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"\nSettings of each stand in {EXPERIMENTS.name}/<group>/<name>.yaml; change them with ARGS=, such as",
        soft_wrap=True,
    )
    console.print('  make bench ARGS="schedule.max_staleness=1 algorithm.correction=tis"', highlight=False)
    return 0


def doctor(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Look at this machine and say what each missing thing means. Exit code 1 if the main job cannot run."""
    from harness.cli.machine_report import examine

    findings = examine(results)
    for finding in findings:
        mark, style = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("missing", "red")}[finding.grade]
        console.print(f"[{style}]{mark:>8}[/]  {finding.what}: {finding.found}", highlight=False)
        if finding.meaning:
            console.print(f"          {finding.meaning}", style="dim", highlight=False, soft_wrap=True)
    return 1 if any(finding.grade == "bad" for finding in findings) else 0
