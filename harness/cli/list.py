"""`make list`, `make metrics`: what can be chosen, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.metrics.formatting import say


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Every choice of every group, with the first line of its file, and every paper experiment."""
    from harness.config.compose import EXPERIMENTS, GROUPS, choices
    from harness.studies.papers.experiment import names, read_experiment

    for group in GROUPS:
        console.print(f"{group}=", style="bold")
        for name in choices(group):
            path = EXPERIMENTS / group / f"{name}.yaml"
            first = path.read_text(encoding="utf-8").splitlines()[0]
            say(console, f"  {name:<16}{first.lstrip('# ')}")
    console.print("PAPER= (make paper)", style="bold")
    for name in names():
        say(console, f"  {name:<20}{read_experiment(name).title}")
    console.print(
        f"\nSettings of each stand in {EXPERIMENTS.name}/<group>/<name>.yaml; change them with ARGS=, such as",
        soft_wrap=True,
    )
    console.print('  make bench ARGS="schedule.max_staleness=1 algorithm.correction=tis"', highlight=False)
    return 0


def metrics(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Every metric of an iteration: name, unit, title and, where that leaves something open, formula."""
    from harness.metrics.definitions import DEFINITIONS, FAMILIES, MEANINGS

    say(console, "of an iteration; its window begins where the one before ends; over the samples that it trained")
    for metric in DEFINITIONS:
        said = ": ".join([metric.title, *filter(None, [MEANINGS.get(metric.name)])])
        say(console, f"  {metric.name:<35}{metric.unit or '-':<17}{said}")
    for names, said in FAMILIES.items():
        say(console, f"  {names}: {said}")
    return 0
