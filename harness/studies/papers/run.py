"""`make paper`: one experiment, or all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from harness.studies.papers.console import show, show_overview
from harness.studies.papers.experiment import PaperExperiment, names, read_experiment
from harness.studies.papers.files import write, write_overview
from harness.studies.papers.result import Result
from harness.studies.papers.surroundings import Surroundings

FOLDER = "papers"
"""Below the results."""


def make(wanted: str, around: Surroundings) -> list[Path]:
    """Run the experiment of this name, or `all`; print, write and draw each. Returns what was written.

    Raises ConfigError for an unknown name, before anything is run.
    """
    experiments: Sequence[PaperExperiment] = [
        read_experiment(name) for name in (names() if wanted == "all" else [wanted])
    ]
    folder = around.results / FOLDER
    paths: list[Path] = []
    results: list[Result] = []
    for experiment in experiments:
        around.told(experiment.name)
        result = run(experiment, around)
        show(result, around.console)
        paths += write(result, folder)
        results.append(result)
    if len(results) > 1:
        show_overview(results, around.console)
        paths.append(write_overview(results, folder))
    return paths


def run(experiment: PaperExperiment, around: Surroundings) -> Result:
    """By the file of the experiment's kind."""
    kind: Callable[[PaperExperiment, Surroundings], Result] = import_module(
        f"harness.studies.papers.kinds.{experiment.kind}"
    ).run
    return kind(experiment, around)
