"""What to mind about a comparison, one line each: few seeds, odd runs, a busy machine, no steady part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from harness.comparison.figures import SPEED, column, seconds, trained, warmup
from harness.comparison.parts import Cell, Measure
from harness.comparison.runs import Run
from harness.comparison.statistics.estimates import outliers, t_critical
from harness.comparison.statistics.series import drift, has_steady_part

_ENOUGH_SEEDS = 5
_MANY = 1000
_SLOW = 0.05  # relative: what is less is not worth a word
_DRIFTS = 1.25
_BUSY = 0.10  # share of the machine
_AHEAD = 0.05  # share of the samples of the steady part


def cautions_of(cells: Sequence[Cell], measures: Sequence[Measure], baseline: int) -> tuple[str, ...]:
    """Every warning, most general first."""
    return (*_seeds(cells, baseline), *_provenance(cells), *_odd_runs(cells, measures), *_runs(cells))


def _seeds(cells: Sequence[Cell], baseline: int) -> Iterator[str]:
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


def _provenance(cells: Sequence[Cell]) -> Iterator[str]:
    runs = [run for cell in cells for run in cell.runs]
    commits = {(run.manifest["git"] or {}).get("commit", "unknown") for run in runs}
    if len(commits) > 1:
        yield f"the runs come from {len(commits)} commits: {', '.join(sorted(commit[:7] for commit in commits))}"
    if any((run.manifest["git"] or {}).get("dirty") for run in runs):
        yield "some runs come from code that differs from its commit"
    if runs[0].identity.backend == "virtual":
        return
    machines = {(its["cpu"], its["cores"], tuple(its["gpus"])) for its in (run.manifest["hardware"] for run in runs)}
    if len(machines) > 1:
        yield f"the runs were made on {len(machines)} kinds of machines: their times cannot be compared"


def _odd_runs(cells: Sequence[Cell], measures: Sequence[Measure]) -> Iterator[str]:
    """Runs far from the others of their cell; of speeds that were measured, not simulated."""
    if cells[0].runs[0].identity.backend == "virtual":
        return
    speed = next(measure for measure in measures if measure.key == SPEED)
    for cell, its in zip(cells, speed.cells, strict=True):
        seeds, values = list(its.per_seed), list(its.per_seed.values())
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


def _runs(cells: Sequence[Cell]) -> Iterator[str]:
    """What is said of single runs, a line per cell: a seed after another would be the same line."""
    for cell in cells:
        for told, of in _ABOUT:
            found = {run.identity.seed: value for run in cell.runs if (value := of(run)) is not None}
            if found:
                which = "every seed" if len(found) == len(cell.runs) else _named(list(found))
                yield f"{cell.label}, {which}: {told.format(max(found.values()))}"
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


_ABOUT: tuple[tuple[str, Callable[[Run], float | None]], ...] = (
    ("no steady part: the run ends within its {:.0f} warm-up iterations, which its rates now include", _unsteady),
    ("{:.0%} of the samples in the steady part were sampled before it: a longer run may be slower", _ahead),
    ("other processes used up to {:.0%} of the machine meanwhile; its times are too long", _busy),
    ("{:.0f} rollout engines were lost", _lost),
)


def _named(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
