"""Two kinds of experiments that only simulate: a published table, predicted, as `make predict` does with any table; and
ways of working as Gantt charts."""

import shlex
from dataclasses import replace

from pydantic.dataclasses import dataclass

from harness.config import STRICT
from harness.config.fields import Count, Positive
from harness.prediction.forecast import words_of
from harness.prediction.posterior import check_given
from harness.prediction.prediction import Predicted, predict
from harness.prediction.table import read_evidence
from harness.report.gantt import same_seconds
from harness.studies.papers.experiment import PAPERS, Context, PaperExperiment
from harness.studies.papers.modes import Mode, drawn_figures, job_of, steps
from harness.studies.papers.result import Result, ResultLine, drawn_line, speedup_lines


@dataclass(frozen=True, config=STRICT)
class PredictedTable:
    """Settings of predicted tables. given: as of `make predict`; within: of the steps, given training phases."""

    given: list[str]
    within: Positive


def run_predicted_table(experiment: PaperExperiment, context: Context) -> Result:
    """Predict the table's asynchronous rows as `make predict` does, once for each `given`."""
    form = experiment.read(PredictedTable)
    lines: list[ResultLine] = []
    for text in form.given:
        lines += drawn_lines(experiment, text, form.within if text == "train" else None, context)
    return Result(experiment, lines)


def drawn_lines(experiment: PaperExperiment, given: str, within: float | None, context: Context) -> list[ResultLine]:
    """The lines of an experiment's table as `make predict` has them. given: rows that are read."""
    evidence = read_evidence(PAPERS / str(experiment.data))
    predicted = predict(evidence, given=check_given(given), processes=context.processes, progress=context.progress)
    return table_lines(predicted, f", given {given}", within)


def table_lines(predicted: Predicted, given: str, within: float | None) -> list[ResultLine]:
    """Steps, medians with the interval of 80 % and the verdict beside the synchronous row, then waits of the trainer. A
    wait has no relative error worth a promise: it may be near 0."""
    lines = []
    for one in predicted.forecasts:
        name, label = f"seconds per step{given}", str(one.row)
        line = drawn_line(name, label, one.step_s, published=one.row.step_s, verdict=one.verdict)
        lines.append(replace(line, within=within))
    for one in predicted.forecasts:
        name = f"seconds of waiting{given}"
        lines.append(drawn_line(name, str(one.row), one.wait_s, published=one.row.wait_s))
    return lines


READ = {"train": "synchronous rows, and the training phases of the others", "sync": "synchronous rows only"}
"""Rows that a prediction reads, by GIVEN."""


def prediction_result(name: str, predicted: Predicted) -> Result:
    """Predictions for people, of a table of this name: beside what was published, with what each stands on, and what
    would settle it."""
    experiment = PaperExperiment(
        name=f"{name}-{predicted.given}",
        title=name,
        kind="predicted_table",
        source=predicted.evidence.source,
        compares=f"rows that are asked for, predicted from {READ[predicted.given]}",
        scale="simulated",
        settings={},
    )
    lines, notes = table_lines(predicted, "", None), list[str]()
    for one in predicted.forecasts:
        row, before, own = str(one.row), one.reference.step_s, one.row.step_s
        verdict, published = f"{one.verdict}, P {one.p_faster:.0%}", before / own if before and own else None
        quantity = f"times as fast as {one.reference}"
        lines.append(drawn_line(quantity, row, one.speedup, published=published, verdict=verdict))
        lines.append(drawn_line("seconds of generating", row, one.generation_s, published=one.row.generate_s))
        told = [one.implausible, f"given: {', '.join(one.given)}", f"assumed: {', '.join(one.assumed)}"]
        told += [f"settled most by: {one.settles or 'nothing alone'}"] * (one.verdict == "cannot be told")
        if (off := predicted.checks.get(one.row.label)) is not None:
            told.append(f"the schedule's own file differs by {off:.2%} of a step at most")
        notes += [f"{row}, {len(one.step_s)} draws: {text}" for text in told if text]
    command = shlex.join(["cadence", "predict", "--table", experiment.source, "--given", predicted.given])
    return Result(experiment, lines, notes, command=command)


@dataclass(frozen=True, config=STRICT)
class Gantt:
    """Settings of Gantt charts. iterations: that are shown."""

    modes: list[Mode]
    iterations: Count


def run_gantt(experiment: PaperExperiment, context: Context) -> Result:
    """Simulate a job under every way of working, drawn on axes of one length; what is idle; and in systems drawn."""
    form = experiment.read(Gantt)
    job, modes = experiment.overrides(), form.modes
    context.progress(f"simulating {len(modes)} ways of working")
    runs = [steps(job_of(mode, job)) for mode in modes]
    lines = [
        ResultLine("seconds per step", mode.label, mode.role, None, run.seconds)
        for mode, run in zip(modes, runs, strict=True)
    ]
    for role in ("rollout", "actor"):
        for mode, run in zip(modes, runs, strict=True):
            idle = 100 * run.recorder.timeline.idle(role, run.window)
            lines.append(ResultLine(f"{role} idle, %", mode.label, mode.role, None, idle))
    context.progress("drawing systems")
    seconds, _, *idle_shares = drawn_figures(modes, job, experiment.given, context.processes)
    for role, shares in zip(("rollout", "actor"), idle_shares, strict=True):
        for mode, draws in zip(modes, shares, strict=True):
            lines.append(drawn_line(f"{role} idle, %, in systems drawn", mode.label, 100 * draws, role=mode.role))
    speedups = {mode.label: seconds[0] / its for mode, its in zip(modes[1:], seconds[1:], strict=True)}
    lines += speedup_lines(speedups, modes[0].label)
    told = {modes[0].label: modes[0].label}
    told |= {label: f"{label}; in systems drawn {words_of(draws)}" for label, draws in speedups.items()}
    shown = {told[mode.label]: (run.recorder.timeline, None) for mode, run in zip(modes, runs, strict=True)}
    return Result(experiment, lines, timelines=same_seconds(shown, form.iterations))
