"""A comparison: what cells of finished runs say of each other, how surely, and its warnings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.comparison.cautions import outlying_runs, warnings_of, withheld_by
from harness.comparison.conservation import Conservation, check_conservation
from harness.comparison.curves import (
    Curve,
    PerformanceProfile,
    StalenessHistogram,
    curves_of,
    profiles_of,
    staleness_of,
)
from harness.comparison.equivalence import Gate
from harness.comparison.fairness import refuse_unfair
from harness.comparison.measures import SPEED, Measure, measures_of, of_trained_samples, outcome_of
from harness.comparison.runs import Cell
from harness.comparison.selection import selection_sentence
from harness.comparison.statistics import MARGIN
from harness.comparison.verdict import (
    Collapse,
    best_of,
    collapse_sentence,
    collapse_warnings,
    collapses_of,
    no_verdict,
    question_of,
    unjudged,
    verdict_of,
    withheld,
)
from harness.config import ConfigError


@dataclass(frozen=True)
class Comparison:
    """Everything that a table or a page shows. `curves` of all cells in a row; what stands per cell is in their order.

    axes: the settings that differ on purpose. simulated: all times come from the cost model. measures: also those of
    `idle/<role>` and `reach/...`, see `Measure`. profiles: empty where nothing was rewarded. gate: what the equivalence
    gate said, None where it was not asked. conservation: what came of holding every ledger against its run's files.
    missing: runs that were asked for and are not there, as lines. left_out: why, by label, of cells that are not
    compared, which says nothing of those that are. claim: what the figures say, where they may say it; question: the
    key of the measure that it is about; best: the cells that it is for; withheld: why it says nothing of that measure,
    unjudged: of what was learnt, both empty where it may; collapses: of each cell's runs, empty where nothing was
    rewarded."""

    cells: tuple[Cell, ...]
    baseline: int
    axes: tuple[str, ...]
    measures: tuple[Measure, ...]
    curves: tuple[Curve, ...]
    staleness: tuple[StalenessHistogram, ...]
    profiles: tuple[PerformanceProfile, ...]
    warnings: tuple[str, ...]
    claim: str
    question: str
    best: tuple[int, ...]
    withheld: str
    unjudged: str
    collapses: tuple[Collapse, ...]
    simulated: bool
    conservation: Conservation
    gate: Gate | None = None
    missing: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> tuple[str, ...]:
        """Reasons against a verdict, a line each."""
        base, speed = self.cells[self.baseline], self.measure(SPEED)
        alone = self.simulated or speed is None or len(self.cells) == 1
        odd = [] if alone or speed is None else [line for line, _ in outlying_runs(base, speed.cells[self.baseline])]
        return (
            *([] if self.gate is None or self.gate.passed else [self.gate.summary()[0]]),
            *([] if self.conservation.passed else [self.conservation.summary()]),
            *self.missing,
            *withheld_by(self.cells),
            *(f"of the baseline, {line}" for line in odd),
        )

    @property
    def verdict(self) -> str:
        """The claim, unless something forbids one."""
        return no_verdict(self.faults) if self.faults else self.claim

    @property
    def of_one_seed(self) -> bool:
        """Whether each cell has one run: then nothing has an interval."""
        return all(len(cell.runs) == 1 for cell in self.cells)

    @property
    def outcome(self) -> Measure | None:
        """The measure of what was learnt, None where nothing was rewarded."""
        return self.measure(outcome_of(self.measures))

    def measure(self, key: str | None) -> Measure | None:
        """The measure of that key, None where these runs have none."""
        return _of(self.measures, key)


def _of(measures: Sequence[Measure], key: str | None) -> Measure | None:
    return next((measure for measure in measures if measure.key == key), None)


def compare(
    cells: Sequence[Cell], axes: Sequence[str] = ("schedule",), baseline: int = 0, margin: float = MARGIN
) -> Comparison:
    """Compare cells, against the cell of index `baseline`. margin: difference that does not matter, as a share. Raises
    ConfigError, naming both, the setting and its two values, for cells that must not be compared."""
    if not cells or not all(cell.runs for cell in cells):
        raise ConfigError("a comparison needs finished runs in every cell")
    runs = {cell.label: cell.runs for cell in cells}
    if len(runs) < len(cells):
        raise ConfigError(f"two of the cells have the same label; they are {', '.join(cell.label for cell in cells)}")
    refuse_unfair(runs, axes)
    measures = measures_of(cells, baseline, margin)
    question, why = question_of(measures, axes), unjudged(measures, axes)
    outcome = _of(measures, outcome_of(measures))
    labels = [cell.label for cell in cells]
    held = withheld(cells, measures, question)
    collapses = () if outcome is None else collapses_of(outcome, baseline)
    told = collapse_sentence(labels, collapses, baseline) if collapses and not why and not held else ""
    shorter = selection_sentence(cells)
    if why or (outcome is not None and not of_trained_samples(outcome.key)):
        measures = tuple(replace(m, better=None) if of_trained_samples(m.key) else m for m in measures)
    said = no_verdict([held]) if held else verdict_of(cells, measures, baseline, question, why)
    return Comparison(
        cells=tuple(cells),
        baseline=baseline,
        axes=tuple(axes),
        measures=measures,
        curves=curves_of(cells),
        staleness=staleness_of(cells),
        profiles=profiles_of(outcome),
        warnings=(
            *warnings_of(cells, measures, baseline, axes),
            *(collapse_warnings(labels, outcome, collapses) if outcome else ()),
        ),
        claim=" ".join(filter(None, (said, told, shorter))),
        question=question,
        withheld=held,
        unjudged=why,
        collapses=collapses,
        best=() if held or (why and question != SPEED) else best_of(cells, measures, baseline, question),
        simulated=cells[0].runs[0].identity.backend == "virtual",
        conservation=check_conservation(run for cell in cells for run in cell.runs),
    )
