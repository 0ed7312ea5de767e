"""Changes from one experiment to another, cell by cell, and how sure: of code, machine or a setting."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.comparison.conservation import Conservation, check_conservation
from harness.comparison.fairness import contents_of, refuse_unfair, setting_text
from harness.comparison.measure_text import Against, against
from harness.comparison.measures import OUTCOMES, SPEED, Measure, measures_of_pairs, outcome_of
from harness.comparison.runs import Cell
from harness.comparison.statistics import MARGIN
from harness.config import ConfigError
from harness.config.job import flatten
from harness.metrics.formatting import listed

RESULTS = (SPEED, *OUTCOMES)
"""Results that a run is made for, of samples that were trained where there is no held-out accuracy: where one of these
got worse, so did the code, or whatever else is not the same."""

_NO_CAUSES = ("experiment", "seeds", "force")  # settings that decide nothing of a run
_OF_MACHINE = ("cpu", "cores", "gpus")


@dataclass(frozen=True)
class Change:
    """A cell that both have. measures: of the one before and the one after, the latter against the former."""

    label: str
    measures: tuple[Measure, ...]


@dataclass(frozen=True)
class Changes:
    """The changes between two experiments. unlike: what is not the same, besides what was measured; unmatched: cells
    that only one has. A line each."""

    cells: tuple[Change, ...]
    unlike: tuple[str, ...]
    unmatched: tuple[str, ...]
    conservation: Conservation

    @property
    def worse(self) -> list[str]:
        """Results that are called worse."""
        return [f"{label}: {title} {text.value} {text.bounds}" for label, title, text in self._results("worse")]

    @property
    def open(self) -> list[str]:
        """Results of which nothing may be said."""
        return [f"{label}: {title}" for label, title, _ in self._results("open")]

    def _results(self, verdict: str) -> list[tuple[str, str, Against]]:
        return [
            (cell.label, measure.title, text)
            for cell in self.cells
            for measure in cell.measures
            if measure.key in (SPEED, outcome_of(cell.measures))
            and (text := against(measure, 1)) is not None
            and text.verdict == verdict
        ]


def changes_between(before: Sequence[Cell], after: Sequence[Cell], margin: float = MARGIN) -> Changes:
    """Cells of the same label, over the seeds that both have, or over all where they share none. margin: difference
    that does not matter, as a share. Raises ConfigError where no label is in both, where one of the two was measured
    and the other was not, and for runs that are no results."""
    old, new = _by_label(before), _by_label(after)
    shared = [label for label in old if label in new]
    if not shared:
        raise ConfigError(f"they have no cell in common: {', '.join(old)} before, {', '.join(new)} after")
    pairs = [_same_seeds(old[label], new[label]) for label in shared]
    for label, (one, other) in zip(shared, pairs, strict=True):
        backends = [cell.runs[0].identity.backend for cell in (one, other)]
        if backends[0] != backends[1]:
            raise ConfigError(
                f"{label} has backend={backends[0]} before and {backends[1]} after: their times are unlike"
            )
    return Changes(
        tuple(map(Change, shared, measures_of_pairs(pairs, margin))),
        tuple(_unlike(shared, pairs)),
        (
            *(f"{label} is only in the first" for label in old if label not in new),
            *(f"{label} is only in the second" for label in new if label not in old),
            *(line for label, pair in zip(shared, pairs, strict=True) for line in _alone(old[label], new[label], pair)),
        ),
        check_conservation(run for pair in pairs for cell in pair for run in cell.runs),
    )


def _by_label(cells: Sequence[Cell]) -> dict[str, Cell]:
    """Raises ConfigError for two of one name, for smoke runs, and for runs of a cell that are not alike."""
    found: dict[str, Cell] = {}
    for cell in cells:
        if cell.label in found:
            folders = " and ".join(str(each.runs[0].path.parent) for each in (found[cell.label], cell))
            raise ConfigError(f"{cell.label} is in {folders}; name one of the experiments")
        refuse_unfair({cell.label: cell.runs})
        found[cell.label] = cell
    return found


def _same_seeds(one: Cell, other: Cell) -> tuple[Cell, Cell]:
    shared = set(one.seeds) & set(other.seeds) or {*one.seeds, *other.seeds}
    return one.of_seeds(shared), other.of_seeds(shared)


def _alone(one: Cell, other: Cell, pair: tuple[Cell, Cell]) -> Iterator[str]:
    """Lines on seeds of both cells that are not in their pair."""
    for cell, kept, where in ((one, pair[0], "first"), (other, pair[1], "second")):
        if more := sorted(set(cell.seeds) - set(kept.seeds)):
            yield f"{cell.label} is without {listed('seed', more)}, which only the {where} has"


def _unlike(labels: Sequence[str], pairs: Sequence[tuple[Cell, Cell]]) -> list[str]:
    """A line for each, with both values; of a setting that is the same in all cells' lines, one for all."""
    lines: dict[str, list[str]] = {}
    for label, (one, other) in zip(labels, pairs, strict=True):
        here, there = (_told_of(cell) for cell in (one, other))
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                values = f"{setting_text(here.get(name))} before, {setting_text(there.get(name))} after"
                lines.setdefault(f"{name}: {values}", []).append(label)
    return [line if len(of) == len(labels) else f"{line} ({', '.join(of)})" for line, of in lines.items()]


def _told_of(cell: Cell) -> Mapping[str, Any]:
    """Facts that may explain a change: every setting, also those that may differ; code, packages, machine."""
    run = cell.runs[0]
    manifest, settings = run.manifest, flatten(run.config)
    git = manifest.get("git") or {}
    return {
        **{name: value for name, value in settings.items() if name not in _NO_CAUSES},
        **contents_of(run),
        "seeds": sorted(cell.seeds),
        "code": f"commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else "of no commit",
        "python": manifest["python"],
        **{f"package {name}": version for name, version in manifest["packages"].items()},
        **{f"machine's {name}": manifest["hardware"].get(name) for name in _OF_MACHINE},
    }
