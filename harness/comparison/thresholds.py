"""Thresholds beyond which a comparison fails, for a script that goes by exit codes: `samples_per_s < 0.95`."""

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.comparison.measure_text import against
from harness.comparison.measures import Measure
from harness.config import ConfigError
from harness.metrics.definitions import DEFINITIONS

_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_WRITTEN = re.compile(r"([\w/.@-]+)\s*(<=|>=|<|>)\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)")
_KNOWN = ("seconds", "eval/sampled", "eval/greedy", "eval/pass_at_k", *(metric.name for metric in DEFINITIONS))
_FAMILIES = ("idle/", "reach/", "selection/", "ledger/", "staleness/", "custom/", "reward/")
"""Beginnings of measures of which a run has several."""

CROSSED = 3  # exit code of a command whose comparison is beyond a threshold, or cannot be held against it


@dataclass(frozen=True)
class Threshold:
    """name: a measure's key, or its last part; bound: of a cell's ratio to the baseline, or difference, as shown."""

    name: str
    sign: str
    bound: float

    def __str__(self) -> str:
        """Return it as it is typed."""
        return f"{self.name} {self.sign} {self.bound:g}"

    def is_of(self, key: str) -> bool:
        """Whether it is of the measure of that key."""
        return key == self.name or key.endswith(f"/{self.name}")


def read_thresholds(text: str) -> tuple[Threshold, ...]:
    """Thresholds with commas between them. Raises ConfigError for what is none."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if (written := _WRITTEN.fullmatch(part)) is None:
            raise ConfigError(f"fail_if={part} cannot be read; write a measure, < or >, a number: samples_per_s < 0.95")
        one = Threshold(written[1], written[2], float(written[3]))
        if not one.name.startswith(_FAMILIES) and not any(map(one.is_of, _KNOWN)):
            raise ConfigError(f"fail_if={part}: there is no measure {one.name}; `cadence metrics` lists them")
        found.append(one)
    return tuple(found)


def crossed(thresholds: Iterable[Threshold], cells: Sequence[tuple[str, Sequence[Measure], int]]) -> list[str]:
    """A line for each cell that is beyond a threshold, and for each of which that cannot be said. cells: label,
    measures, and which of a measure's cells it is."""
    lines = []
    for threshold in thresholds:
        for label, measures, index in cells:
            of = [measure for measure in measures if threshold.is_of(measure.key)]
            difference = of[0].against_baseline(index) if len(of) == 1 else None
            text = against(of[0], index) if difference is not None else None
            if difference is None or text is None:
                named = f"{len(of)} measures: {', '.join(measure.key for measure in of)}" if len(of) > 1 else "no value"
                lines.append(f"{label}: fail_if={threshold} cannot be judged: {named}")
            elif not difference.judged:
                why = "fewer than three seeds, or a busy machine"
                lines.append(f"{label}: fail_if={threshold} cannot be judged of {text.value}: {why}")
            elif _SIGNS[threshold.sign](difference.interval.value, threshold.bound):
                lines.append(f"{label}: {threshold}: it is {text.value} {text.bounds}")
    return lines
