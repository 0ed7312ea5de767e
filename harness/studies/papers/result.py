"""The result of a paper experiment: published, simulated and measured figures side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd

from harness.metrics.formatting import decimals, number
from harness.metrics.tables import Table
from harness.prediction.forecast import interval, verdict_of
from harness.prediction.priors import Draws
from harness.studies.papers.experiment import PaperExperiment

Role = Literal["base", "fitted", "predicted", "measured"]
"""Roles of a line: what the others are relative to or calibrated on; fitted to; predicted without; only measured."""

Published = float | tuple[float, float] | str | None
"""A figure, a band, or words where the source gives no figure; None where it says nothing."""

ROLES = {"base": "base", "fitted": "fitted to", "predicted": "", "measured": ""}

_COLUMNS = ("", "role", "published", "simulated", "80 %", "measured on tiny", "error", "promised", "verdict")


@dataclass(frozen=True)
class ResultLine:
    """A figure of a result. quantity: what it is, with its unit; figures of one quantity share a panel of the picture.
    within: the relative error that is promised of a prediction, None where none is. interval: of 80 % of the draws,
    where what is simulated is their median; verdict: of these, beside the synchronous row. seeds: of what is
    measured."""

    quantity: str
    label: str
    role: Role
    published: Published = None
    simulated: float | None = None
    measured: float | None = None
    within: float | None = None
    interval: tuple[float, float] | None = None
    verdict: str = ""
    seeds: tuple[float, ...] = ()

    @property
    def error(self) -> float | None:
        """Simulated over published, less 1; of a band, over the end that it misses; None where one of them is not."""
        if self.simulated is None or self.published is None or isinstance(self.published, str):
            return None
        if isinstance(self.published, tuple):
            low, high = self.published
            near = min(max(self.simulated, low), high)
            return self.simulated / near - 1
        return self.simulated / self.published - 1

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None where there is none."""
        return None if self.within is None or self.error is None else abs(self.error) <= self.within


def drawn_line(
    quantity: str, label: str, draws: Draws, *, role: Role = "predicted", published: Published = None, verdict: str = ""
) -> ResultLine:
    """A line of the median and the interval of draws."""
    median = float(np.median(draws))
    return ResultLine(quantity, label, role, published, median, interval=interval(draws), verdict=verdict)


def speedup_lines(speedups: Mapping[str, Draws], base: str) -> list[ResultLine]:
    """Lines of speed-ups over a base, by the label of what has them, with their verdicts."""
    name = f"times as fast as {base}, in systems drawn"
    return [drawn_line(name, label, draws, verdict=verdict_of(draws)) for label, draws in speedups.items()]


@dataclass(frozen=True)
class Result:
    """The result of an experiment. tables: beside the main one. timelines: as `same_seconds` has them, for a picture
    where bars of all lines would not say it. command: that makes it again, where that is not `cadence paper`."""

    experiment: PaperExperiment
    lines: Sequence[ResultLine]
    notes: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=list)
    timelines: pd.DataFrame | None = None
    command: str = ""


def tables_of(result: Result) -> list[Table]:
    """A table for each quantity, of the columns that say something, and the further tables as they are."""
    quantities = dict.fromkeys(line.quantity for line in result.lines)
    return [
        *(_table(name, [line for line in result.lines if line.quantity == name]) for name in quantities),
        *result.tables,
    ]


def overview(results: Iterable[Result]) -> Table:
    """Every figure that is both published and simulated, with its error, of all experiments."""
    rows = [
        [result.experiment.name, line.quantity, line.label, *figures(line)[:2], error(line), promised(line)]
        for result in results
        for line in result.lines
        if line.error is not None and line.role == "predicted"
    ]
    return Table(
        "predicted, beside what was published",
        ["experiment", "figure", "row", "published", "simulated", "error", "promised"],
        rows,
    )


def _table(quantity: str, lines: Sequence[ResultLine]) -> Table:
    rows = []
    for line in lines:
        published, simulated, measured = figures(line)
        cells = [published, simulated, text(line.interval), measured, error(line), promised(line), line.verdict]
        rows.append([line.label, ROLES[line.role], *cells])
    kept = [column for column in range(len(_COLUMNS)) if not column or any(row[column] for row in rows)]
    return Table(quantity, [_COLUMNS[column] for column in kept], [[row[column] for column in kept] for row in rows])


def figures(line: ResultLine) -> list[str]:
    """Published, simulated, measured; empty where there is none."""
    return [text(line.published), text(line.simulated), text(line.measured)]


def error(line: ResultLine) -> str:
    """Error of what is simulated, relative to what is published; empty where one of them is not there."""
    if line.error is None:
        return ""
    return "inside" if isinstance(line.published, tuple) and line.error == 0 else f"{line.error:+.1%}"


def promised(line: ResultLine) -> str:
    """The error that is promised of a prediction, and whether it is kept."""
    if line.within is None:
        return ""
    return f"{line.within:.0%}" + {True: ", kept", False: ", MISSED", None: ""}[line.met]


def text(value: Published) -> str:
    """A figure as tables show it: three significant digits, one of them at least behind the point."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return f"{text(value[0])} to {text(value[1])}"
    return number(value, max(1, decimals([value])))
