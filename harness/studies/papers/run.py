"""`make paper`: one experiment, or all of them."""

from collections.abc import Callable
from pathlib import Path

from harness.studies.papers.experiment import Context, Kind, PaperExperiment, names, read_experiment
from harness.studies.papers.fits import Calibrated, FittedRatio, run_calibrated, run_fitted_ratio
from harness.studies.papers.measured import MeasuredCells, run_measured
from harness.studies.papers.report import show, write, write_overview
from harness.studies.papers.result import Result, overview
from harness.studies.papers.scaling import Scaling, run_scaling
from harness.studies.papers.simulated import Gantt, PredictedTable, run_gantt, run_predicted_table

FOLDER = "papers"  # folder of papers below the results

KINDS: dict[Kind, tuple[type, Callable[[PaperExperiment, Context], Result]]] = {
    "fitted_ratio": (FittedRatio, run_fitted_ratio),
    "scaling": (Scaling, run_scaling),
    "calibrated": (Calibrated, run_calibrated),
    "predicted_table": (PredictedTable, run_predicted_table),
    "measured": (MeasuredCells, run_measured),
    "gantt": (Gantt, run_gantt),
}
"""The `settings` of an experiment of each kind, and what runs it."""


def run_papers(wanted: str, context: Context) -> list[Path]:
    """Run the experiment of this name, or `all`; print, write and draw each. Returns what was written. Raises
    ConfigError for an unknown name, before anything is run."""
    experiments = [read_experiment(name) for name in (names() if wanted == "all" else [wanted])]
    folder = context.results / FOLDER
    paths: list[Path] = []
    results: list[Result] = []
    for experiment in experiments:
        context.progress(experiment.name)
        _, run = KINDS[experiment.kind]
        results.append(run(experiment, context))
        show(results[-1], context.console)
        paths += write(results[-1], folder)
    if len(results) > 1:
        context.console.print(overview(results))
        paths += write_overview(results, folder)
    return paths
