"""What a paper experiment came to: published, simulated and measured figures side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from matplotlib.figure import Figure

from harness.studies.papers.experiment import PaperExperiment

Role = Literal["base", "fitted", "predicted", "measured"]
"""Of a line: what the others are relative to or calibrated on; fitted to; predicted without; only measured."""

Published = float | tuple[float, float] | str | None
"""A figure, a band, or words where the source gives no figure; None where it says nothing."""


@dataclass(frozen=True)
class Line:
    """One figure. quantity: what it is, with its unit; figures of one quantity share a panel of the picture.

    within: the relative error that is promised of a prediction, None where none is.
    """

    quantity: str
    label: str
    role: Role
    published: Published = None
    simulated: float | None = None
    measured: float | None = None
    within: float | None = None

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


@dataclass(frozen=True)
class Table:
    """Figures beside the main ones, such as what a prediction depends on."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Result:
    """draw: the picture, where bars of all lines would not say it."""

    experiment: PaperExperiment
    lines: Sequence[Line]
    notes: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=list)
    draw: Callable[[Figure], None] | None = None
