"""What a comparison comes to, in a sentence or two that claim no more than their intervals."""

from __future__ import annotations

from collections.abc import Sequence

from harness.comparison.figures import EXACT_MATCH, SPEED
from harness.comparison.parts import Cell, CellMeasure, Measure
from harness.comparison.statistics.differences import Difference
from harness.metrics.manifest import HOW_TIMED

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def verdict_of(cells: Sequence[Cell], measures: Sequence[Measure], baseline: int) -> str:
    """Of the fastest cell: how fast against the baseline, and whether it learns as well."""
    by_key = {measure.key: measure for measure in measures}
    speed = by_key[SPEED]
    told = _alone(cells[0], speed.cells[0]) if len(cells) == 1 else _fastest(cells, speed, baseline, by_key)
    backend = cells[0].runs[0].identity.backend
    return told if backend == "real" else f"{HOW_TIMED[backend].capitalize()}: {told}"


def _fastest(cells: Sequence[Cell], speed: Measure, baseline: int, by_key: dict[str, Measure]) -> str:
    others = [index for index in range(len(cells)) if index != baseline]
    best = max(others, key=lambda index: speed.cells[index].value)
    ratio = _ratio(speed, best)
    ours, theirs, how = cells[best].label, cells[baseline].label, _how(cells, speed, best, baseline)
    if _faster(ratio):
        first = f"{ours} trains {how} the samples per second of {theirs}"
    elif ratio.distinguishable:
        first = f"{theirs} trains most samples per second; {ours}, which comes next, trains {how} as many"
    else:
        which = "" if len(others) == 1 else ", the fastest of the others,"
        first = f"{ours}{which} cannot be told from {theirs} in samples per second: {how}"
    if EXACT_MATCH not in by_key:
        return f"{first}."
    learnt = {index: by_key[EXACT_MATCH].cells[index].difference for index in others}
    told = f"{first}; {_learns(cells[best], learnt[best])}."
    good = [index for index in others if not _lower(learnt[index]) and _faster(_ratio(speed, index))]
    if not _lower(learnt[best]) or not good:
        return told
    next_best = max(good, key=lambda index: speed.cells[index].value)
    which = f"Of those that learn no worse than {theirs}, as far as these seeds can tell,"
    return f"{told} {which} {cells[next_best].label} is the fastest with {_how(cells, speed, next_best, baseline)}."


def _ratio(speed: Measure, cell: int) -> Difference:
    ratio = speed.cells[cell].ratio
    assert ratio is not None, "rates are positive"
    return ratio


def _faster(ratio: Difference) -> bool:
    return ratio.distinguishable and ratio.interval.value > 1


def _lower(learnt: Difference | None) -> bool:
    return learnt is not None and learnt.distinguishable and learnt.interval.value < 0


def _how(cells: Sequence[Cell], speed: Measure, cell: int, baseline: int) -> str:
    ratio = _ratio(speed, cell)
    return f"{ratio.interval.value:.2f}x ({_sure(cells[cell], cells[baseline], ratio)})"


def _learns(cell: Cell, learnt: Difference | None) -> str:
    assert learnt is not None, "exact matches are finite"
    value = learnt.interval.value
    if learnt.distinguishable:
        bounds = f"{learnt.interval.low:+.3f} to {learnt.interval.high:+.3f}"
        return f"its exact match at the end is {abs(value):.3f} {'higher' if value > 0 else 'lower'} ({bounds})"
    seeds = len(learnt.per_seed) or len(cell.runs)
    count = _NUMBERS[seeds] if seeds < len(_NUMBERS) else str(seeds)
    if not learnt.interval.bounded:
        return f"exact match at the end differs by {value:+.3f}, of which {count} seed says nothing"
    bounds = f"{value:+.3f}, {learnt.interval.low:+.3f} to {learnt.interval.high:+.3f}"
    return f"exact match at the end differs by no more than {count} seeds can tell ({bounds})"


def _alone(cell: Cell, speed: CellMeasure) -> str:
    interval = speed.interval
    bounds = f" ({interval.low:,.4g} to {interval.high:,.4g})" if interval and interval.bounded else ""
    return f"{cell.label} trains {speed.value:,.4g} samples per second{bounds}; there is nothing to compare it with."


def _sure(ours: Cell, theirs: Cell, ratio: Difference) -> str:
    pairs = len(ratio.per_seed)
    paired = f"{pairs} paired seed{'s' * (pairs > 1)}"
    seeds = paired if pairs else f"{len(ours.runs)} and {len(theirs.runs)} seeds, unpaired"
    return f"{ratio.interval.low:.2f} to {ratio.interval.high:.2f}, {seeds}" if ratio.interval.bounded else seeds
