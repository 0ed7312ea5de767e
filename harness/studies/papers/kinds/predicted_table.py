"""A published table of step times, predicted as `make predict` does."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from harness.config import STRICT
from harness.config.fields import Positive
from harness.studies.papers.experiment import PAPERS, PaperExperiment
from harness.studies.papers.result import Line, Result
from harness.studies.papers.surroundings import Surroundings
from harness.studies.predictions.phases import check_given
from harness.studies.predictions.prediction import Prediction
from harness.studies.predictions.run import Predicted, predict_table


@dataclass(frozen=True, config=STRICT)
class PredictedTable:
    """given: as GIVEN of `make predict`, one or several; within: of the steps, where training phases are given."""

    given: list[str]
    within: Positive


def run(experiment: PaperExperiment, around: Surroundings) -> Result:
    """Predict the table's asynchronous rows, once for each `given`."""
    form = experiment.read(PredictedTable)
    lines: list[Line] = []
    for text in form.given:
        given = check_given(text)
        table = PAPERS / str(experiment.data)
        predicted = predict_table(table, given, processes=around.processes, progress=around.told)
        lines += lines_of(predicted, f", given {text}", form.within if text == "train" else None)
    return Result(experiment, lines)


def lines_of(predicted: Predicted, given: str, within: float | None) -> list[Line]:
    """Steps, then waits of the trainer. A wait has no relative error worth a promise: it may be near 0."""
    steps = [
        _line(its, f"seconds per step{given}", its.row.step_s, its.step_s, within) for its in predicted.predictions
    ]
    waits = [
        _line(its, f"seconds of waiting{given}", its.row.wait_s, its.wait_s, None) for its in predicted.predictions
    ]
    return [*steps, *waits]


def _line(its: Prediction, quantity: str, published: float | None, simulated: float, within: float | None) -> Line:
    return Line(quantity, str(its.row), "predicted", published, simulated, within=within)
