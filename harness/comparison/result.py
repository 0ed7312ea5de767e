"""A comparison: what cells of finished runs say of each other, how surely, and what to mind about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.comparison.cautions import cautions_of
from harness.comparison.conservation import Conservation, check_conservation
from harness.comparison.curves import curves_of, profiles_of, staleness_of
from harness.comparison.equivalence import Gate
from harness.comparison.fairness import refuse_unfair
from harness.comparison.measures import measures_of
from harness.comparison.parts import Cell, Curve, Measure, Profile, StalenessHistogram
from harness.comparison.verdict import verdict_of
from harness.config import ConfigError


@dataclass(frozen=True)
class Comparison:
    """Everything that a table or a page shows. `curves` of all cells in a row; what stands per cell is in their order.

    axes: the settings that differ on purpose. simulated: all times come from the cost model. measures: also those of
    `idle/<role>` and `reach/...`, see `Measure`. profiles: empty where nothing was rewarded. gate: what the equivalence
    gate said, None where it was not asked. conservation: what came of holding every ledger against its run's files.
    """

    cells: tuple[Cell, ...]
    baseline: int
    axes: tuple[str, ...]
    measures: tuple[Measure, ...]
    curves: tuple[Curve, ...]
    staleness: tuple[StalenessHistogram, ...]
    profiles: tuple[Profile, ...]
    warnings: tuple[str, ...]
    verdict: str
    simulated: bool
    gate: Gate | None = None
    conservation: Conservation | None = None

    def measure(self, key: str) -> Measure | None:
        """The measure of that key, None where these runs have none."""
        return next((measure for measure in self.measures if measure.key == key), None)


def compare(cells: Sequence[Cell], axes: Sequence[str] = ("schedule",), baseline: int | None = None) -> Comparison:
    """Compare cells, against the cell of index `baseline` (the first by default).

    Raises ConfigError, naming both, the setting and its two values, for cells that must not be compared.
    """
    if not cells or not all(cell.runs for cell in cells):
        raise ConfigError("a comparison needs finished runs in every cell")
    runs = {cell.label: cell.runs for cell in cells}
    if len(runs) < len(cells):
        raise ConfigError(f"two of the cells have the same label; they are {', '.join(cell.label for cell in cells)}")
    refuse_unfair(runs, axes)
    against = baseline or 0
    measures = measures_of(cells, against)
    return Comparison(
        cells=tuple(cells),
        baseline=against,
        axes=tuple(axes),
        measures=measures,
        curves=curves_of(cells),
        staleness=staleness_of(cells),
        profiles=profiles_of(cells),
        warnings=cautions_of(cells, measures, against),
        verdict=verdict_of(cells, measures, against),
        simulated=cells[0].runs[0].identity.backend == "virtual",
        conservation=check_conservation(run for cell in cells for run in cell.runs),
    )
