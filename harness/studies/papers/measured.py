"""Cells that are run for real, in miniature, beside what was published at full size; some are simulated as well."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from statistics import fmean, stdev
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from harness.campaigns.cells import CellRequest, ResolvedCell, resolve_cells
from harness.campaigns.execution import Runs, print_failures, run_cells
from harness.config import STRICT, ConfigError
from harness.config.fields import Count, Fraction
from harness.metrics.run_files import load_metrics
from harness.metrics.tables import Table
from harness.runtime.runtime import machine_of_runs
from harness.studies.papers.experiment import Context, PaperExperiment
from harness.studies.papers.modes import Mode, drawn_figures, job_of, step_figures
from harness.studies.papers.result import Published, Result, ResultLine, speedup_lines

SIMULATED = "seconds per step"  # the quantity of cells that are simulated too


@dataclass(frozen=True, config=STRICT)
class MeasuredFigure:
    """A metric of the runs. last: share of the iterations, at the end, to average; relative_to: a cell that is 1."""

    quantity: Annotated[str, Field(min_length=1)]
    metric: str
    last: Fraction
    relative_to: str | None = None


@dataclass(frozen=True, config=STRICT)
class MeasuredCell:
    """label; job: its settings. published: by quantity, a number or words; row, column: where the number stands in the
    data, for the first quantity. simulated: settings of a job at full size."""

    label: Annotated[str, Field(min_length=1)]
    job: list[str]
    published: dict[str, float | str] = field(default_factory=dict)
    row: dict[str, str] = field(default_factory=dict)
    column: str | None = None
    simulated: list[str] = field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class MeasuredCells:
    """Settings of measured experiments. cells: each is run with all `seeds`, and shown in the mean over them."""

    seeds: Count
    figures: list[MeasuredFigure]
    cells: list[MeasuredCell]


def run_measured(experiment: PaperExperiment, context: Context) -> Result:
    """Run what is not done yet, below results/paper_<name>/, and read it. Raises ConfigError where a run failed."""
    form = experiment.read(MeasuredCells)
    job = (*experiment.overrides(), f"experiment=paper_{experiment.name}")
    cells, skipped = resolve_cells(
        [CellRequest(cell.label, (*job, *cell.job)) for cell in form.cells], {}, machine_of_runs()
    )
    if skipped:
        raise ConfigError(": ".join(next(iter(skipped.items()))))
    runs = Runs(tuple(cells), tuple(range(form.seeds)), context.results)
    context.progress(f"running {len(runs.to_do())} of {len(runs.all)} runs")
    outcome = run_cells(runs, context.console, context.start)
    print_failures(outcome.failed, context.console)
    if outcome.failed:
        raise ConfigError(f"{len(outcome.failed)} runs failed; paper={experiment.name} again runs them again")
    read = {cell.label: [load_metrics(cell.folder(seed, context.results)) for seed in runs.seeds] for cell in cells}
    published = _published(experiment, form)
    lines = [line for figure in form.figures for line in lines_of(figure, form.cells, read, published)]
    lines += simulated_lines(form, context)
    return Result(experiment, lines, tables=[_per_seed(form, read, cells)])


Metrics = Sequence[Mapping[str, Any]]


def value_of(figure: MeasuredFigure, metrics: Metrics) -> float:
    """The mean of the metric over the last iterations of a run."""
    count = max(1, round(figure.last * len(metrics)))
    return fmean(float(row[figure.metric]) for row in metrics[-count:])


def lines_of(
    figure: MeasuredFigure,
    cells: Sequence[MeasuredCell],
    read: Mapping[str, Sequence[Metrics]],
    published: Mapping[tuple[str, str], Published],
) -> list[ResultLine]:
    """The figure of every cell, a mean over seeds, and of each seed; relative to one cell if asked, seed by seed."""
    seeds = {cell.label: [value_of(figure, run) for run in read[cell.label]] for cell in cells}
    measured = {label: fmean(values) for label, values in seeds.items()}
    reported = {cell.label: published.get((cell.label, figure.quantity)) for cell in cells}
    if figure.relative_to is not None:
        base, own = reported[figure.relative_to], measured[figure.relative_to]
        measured = {label: value / own for label, value in measured.items()}
        pairs = {label: zip(values, seeds[figure.relative_to], strict=True) for label, values in seeds.items()}
        seeds = {label: [value / beside for value, beside in of] for label, of in pairs.items()}
        if isinstance(base, float):
            reported = {label: value / base if isinstance(value, float) else value for label, value in reported.items()}
    return [
        ResultLine(figure.quantity, label, "measured", reported[label], None, measured[label], seeds=tuple(values))
        for label, values in seeds.items()
    ]


def _published(experiment: PaperExperiment, form: MeasuredCells) -> dict[tuple[str, str], Published]:
    """Published figures by cell and quantity. Raises ConfigError for a cell whose row the data does not have."""
    found: dict[tuple[str, str], Published] = {}
    for cell in form.cells:
        found |= {(cell.label, quantity): value for quantity, value in cell.published.items()}
        if cell.column is not None:
            rows = experiment.published(**cell.row)
            if len(rows) != 1 or cell.column not in rows[0]:
                raise ConfigError(
                    f"{experiment.path}: {cell.label}: {experiment.data} has no one cell {cell.row}, {cell.column}"
                )
            found[cell.label, form.figures[0].quantity] = float(rows[0][cell.column])
    return found


def simulated_lines(form: MeasuredCells, context: Context) -> list[ResultLine]:
    """Steps at full size, and how many times as many samples a second there are, in systems drawn, as in the cell that
    the first figure is relative to, or in the first of all, which works in turn."""
    modes = [Mode(cell.label, cell.simulated, "measured") for cell in form.cells if cell.simulated]
    if not modes:
        return []
    context.progress(f"simulating {len(modes)} cells at full size")
    jobs = [job_of(mode, []) for mode in modes]
    lines = [
        ResultLine(f"{SIMULATED}, at full size", mode.label, "measured", None, step_figures(job).seconds)
        for mode, job in zip(modes, jobs, strict=True)
    ]
    given = {setting.partition("=")[0] for setting in modes[0].job}
    seconds = drawn_figures(modes, [], given, context.processes)[0]
    rates = {mode.label: job.algorithm.batch_samples / its for mode, job, its in zip(modes, jobs, seconds, strict=True)}
    asked = form.figures[0].relative_to or ""
    base = asked if asked in rates else modes[0].label
    beside = rates.pop(base)
    return lines + speedup_lines({label: rate / beside for label, rate in rates.items()}, base)


def _per_seed(form: MeasuredCells, read: Mapping[str, Sequence[Metrics]], cells: Sequence[ResolvedCell]) -> Table:
    """Every figure of every run: means alone would hide how far seeds are apart."""
    columns = ["cell", "figure", *(f"seed {seed}" for seed in range(form.seeds)), "standard deviation"]
    rows = []
    for figure in form.figures:
        for cell in cells:
            values = [value_of(figure, run) for run in read[cell.label]]
            spread = f"{stdev(values):.3g}" if len(values) > 1 else ""
            rows.append([cell.label, figure.metric, *(f"{value:.4g}" for value in values), spread])
    return Table("measured, seed by seed", columns, rows)
