"""What a comparison comes to, in sentences: the verdict, which claims no more than its intervals, and warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from harness.comparison.measures import EXACT_MATCH, SPEED, CellMeasure, Measure, column, seconds, trained, warmup
from harness.comparison.runs import Cell, Run
from harness.comparison.statistics.differences import Difference
from harness.comparison.statistics.estimates import outliers, t_critical
from harness.comparison.statistics.series import drift, has_steady_part
from harness.metrics.manifest import HOW_TIMED

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_ENOUGH_SEEDS = 5
_MANY = 1000  # degrees of freedom
_SLOW = 0.05  # relative: a smaller deviation is no outlier
_DRIFTS = 1.25
_BUSY = 0.10  # share of the machine
_AHEAD = 0.05  # share of the samples of the steady part


def verdict_of(cells: Sequence[Cell], measures: Sequence[Measure], baseline: int) -> str:
    """Of the fastest cell: how fast against the baseline, and whether it learns as well."""
    by_key = {measure.key: measure for measure in measures}
    speed = by_key[SPEED]
    text = _alone(cells[0], speed.cells[0]) if len(cells) == 1 else _fastest(cells, speed, baseline, by_key)
    backend = cells[0].runs[0].identity.backend
    return text if backend == "real" else f"{HOW_TIMED[backend].capitalize()}: {text}"


def _fastest(cells: Sequence[Cell], speed: Measure, baseline: int, by_key: dict[str, Measure]) -> str:
    others = [index for index in range(len(cells)) if index != baseline]
    best = max(others, key=lambda index: speed.cells[index].value)
    ratio = _ratio(speed, best)
    name, base, how = cells[best].label, cells[baseline].label, _ratio_text(cells, speed, best, baseline)
    if _faster(ratio):
        first = f"{name} trains {how} the samples per second of {base}"
    elif ratio.distinguishable:
        first = f"{base} trains most samples per second; {name}, which comes next, trains {how} as many"
    else:
        which = "" if len(others) == 1 else ", the fastest of the others,"
        first = f"{name}{which} cannot be told from {base} in samples per second: {how}"
    if EXACT_MATCH not in by_key:
        return f"{first}."
    learnt = {index: by_key[EXACT_MATCH].cells[index].difference for index in others}
    verdict = f"{first}; {_learning(cells[best], learnt[best])}."
    good = [index for index in others if not _lower(learnt[index]) and _faster(_ratio(speed, index))]
    if not _lower(learnt[best]) or not good:
        return verdict
    next_best = max(good, key=lambda index: speed.cells[index].value)
    which = f"Of those that learn no worse than {base}, as far as these seeds can tell,"
    how = _ratio_text(cells, speed, next_best, baseline)
    return f"{verdict} {which} {cells[next_best].label} is the fastest with {how}."


def _ratio(speed: Measure, cell: int) -> Difference:
    ratio = speed.cells[cell].ratio
    assert ratio is not None, "rates are positive"
    return ratio


def _faster(ratio: Difference) -> bool:
    return ratio.distinguishable and ratio.interval.value > 1


def _lower(learnt: Difference | None) -> bool:
    return learnt is not None and learnt.distinguishable and learnt.interval.value < 0


def _ratio_text(cells: Sequence[Cell], speed: Measure, cell: int, baseline: int) -> str:
    ratio = _ratio(speed, cell)
    return f"{ratio.interval.value:.2f}x ({_certainty(cells[cell], cells[baseline], ratio)})"


def _learning(cell: Cell, learnt: Difference | None) -> str:
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


def _certainty(cell: Cell, baseline: Cell, ratio: Difference) -> str:
    pairs = len(ratio.per_seed)
    paired = f"{pairs} paired seed{'s' * (pairs > 1)}"
    seeds = paired if pairs else f"{len(cell.runs)} and {len(baseline.runs)} seeds, unpaired"
    return f"{ratio.interval.low:.2f} to {ratio.interval.high:.2f}, {seeds}" if ratio.interval.bounded else seeds


def warnings_of(cells: Sequence[Cell], measures: Sequence[Measure], baseline: int) -> tuple[str, ...]:
    """Lines on what to mind, most general first: few seeds, odd runs, a busy machine, no steady part."""
    return (*_of_seeds(cells, baseline), *_of_origin(cells), *_of_outliers(cells, measures), *_of_runs(cells))


def _of_seeds(cells: Sequence[Cell], baseline: int) -> Iterator[str]:
    fewest = min(len(cell.runs) for cell in cells)
    others = len(cells) - 1
    if fewest == 1:
        yield "one seed: there is no interval, and nothing can be told apart"
    elif fewest < _ENOUGH_SEEDS:
        few, many = (t_critical(freedom, 1 - 0.05 / max(1, others)) for freedom in (fewest - 1, _MANY))
        yield (
            f"{fewest} seeds only: the clearest difference has to be {few:.1f} standard errors large to be called one; "
            f"with many seeds {many:.1f} would do"
        )
    reference = set(cells[baseline].seeds)
    for cell in cells:
        if not reference & set(cell.seeds):
            yield f"{cell.label} has no seed in common with the baseline: compared as groups, which tells less"
        elif reference != set(cell.seeds):
            both = len(reference & set(cell.seeds))
            yield f"{cell.label} and the baseline have {both} seeds in common: they are compared by these only"


def _of_origin(cells: Sequence[Cell]) -> Iterator[str]:
    runs = [run for cell in cells for run in cell.runs]
    commits = {(run.manifest["git"] or {}).get("commit", "unknown") for run in runs}
    if len(commits) > 1:
        yield f"the runs come from {len(commits)} commits: {', '.join(sorted(commit[:7] for commit in commits))}"
    if any((run.manifest["git"] or {}).get("dirty") for run in runs):
        yield "some runs come from code that differs from its commit"
    if runs[0].identity.backend == "virtual":
        return
    machines = {(hw["cpu"], hw["cores"], tuple(hw["gpus"])) for hw in (run.manifest["hardware"] for run in runs)}
    if len(machines) > 1:
        yield f"the runs were made on {len(machines)} kinds of machines: their times cannot be compared"


def _of_outliers(cells: Sequence[Cell], measures: Sequence[Measure]) -> Iterator[str]:
    """Runs far from the others of their cell; of speeds that were measured, not simulated."""
    if cells[0].runs[0].identity.backend == "virtual":
        return
    speed = next(measure for measure in measures if measure.key == SPEED)
    for cell, measured in zip(cells, speed.cells, strict=True):
        seeds, values = list(measured.per_seed), list(measured.per_seed.values())
        first = seeds.index(min(cell.runs, key=lambda run: run.manifest["started_at"]).identity.seed)
        for index in outliers(values, least=_SLOW):
            off = values[index] / float(np.median(values)) - 1
            far = f"{abs(off):.0%} {'faster' if off > 0 else 'slower'} than the median of its seeds"
            if index == first and off < 0:
                yield (
                    f"{cell.label}: the first run (seed {seeds[index]}) is {far}: caches may have been cold; run it "
                    "again with force=true"
                )
            else:
                yield f"{cell.label}: seed {seeds[index]} is an outlier, {far}; run it again with force=true"


def _of_runs(cells: Sequence[Cell]) -> Iterator[str]:
    """Of single runs, a line per cell: otherwise every seed would repeat it."""
    for cell in cells:
        for text, of in _RUN_WARNINGS:
            found = {run.identity.seed: value for run in cell.runs if (value := of(run)) is not None}
            if found:
                which = "every seed" if len(found) == len(cell.runs) else _seeds_text(list(found))
                yield f"{cell.label}, {which}: {text.format(max(found.values()))}"
        change = float(np.median([drift(column(run, "time/iteration_s"), warmup(run)) for run in cell.runs]))
        if max(change, 1 / change) > _DRIFTS:
            yield f"{cell.label}: not steady: iterations at the end take {change:.2f} times as long as after warm-up"


def _unsteady(run: Run) -> float | None:
    return None if has_steady_part(len(run.metrics), warmup(run)) else float(warmup(run))


def _ahead(run: Run) -> float | None:
    """Share of the samples of the steady part that were finished before it began."""
    if not has_steady_part(len(run.metrics), warmup(run)) or not warmup(run):
        return None
    start = seconds(run)[warmup(run) - 1]
    counted = trained(run, "trained_at") >= start
    share = float(np.mean(trained(run, "finished_at")[counted] < start))
    return share if share > _AHEAD else None


def _busy(run: Run) -> float | None:
    if run.identity.backend == "virtual":
        return None
    others = run.manifest.get("load", {}).get("others", 0.0)
    return others if others > _BUSY else None


def _lost(run: Run) -> float | None:
    lost = sum(event["what"] == "lost" for event in run.ledger.get("engines", []))
    return float(lost) if lost else None


_RUN_WARNINGS: tuple[tuple[str, Callable[[Run], float | None]], ...] = (
    ("no steady part: the run ends within its {:.0f} warm-up iterations, which its rates now include", _unsteady),
    ("{:.0%} of the samples in the steady part were sampled before it: a longer run may be slower", _ahead),
    ("other processes used up to {:.0%} of the machine meanwhile; its times are too long", _busy),
    ("{:.0f} rollout engines were lost", _lost),
)


def _seeds_text(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
