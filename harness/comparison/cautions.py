"""Warnings of a comparison: few seeds, odd runs, a busy machine, no steady part, and all that went wrong in a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from harness.comparison.fairness import setting_text
from harness.comparison.measures import SPEED, CellMeasure, Measure, column, seconds, trained, warmup
from harness.comparison.runs import Cell, Run
from harness.comparison.statistics import FEWEST, drift, has_steady_part, outliers, t_critical
from harness.metrics.definitions import Found, found_faults
from harness.metrics.formatting import listed, plural
from harness.metrics.ledger import DropReason
from harness.metrics.manifest import BUSY, others_load

_ENOUGH_SEEDS = 5
_MANY = 1000  # degrees of freedom
_SLOW = 0.05  # relative: a smaller deviation is no outlier
_DRIFTS = 1.25
_AHEAD = 0.05  # share of the samples of the steady part
_EACH = 3  # cells that a warning has a line for each of


def warnings_of(
    cells: Sequence[Cell], measures: Sequence[Measure], baseline: int, axes: Sequence[str]
) -> tuple[str, ...]:
    """Warnings, most general first: few seeds, an idle treatment, odd runs, a busy machine, no steady part."""
    return (
        *_of_seeds(cells, baseline),
        *_of_treatments(cells, axes),
        *_of_origin(cells),
        *_of_outliers(cells, measures),
        *_of_runs(cells),
        *_of_faults(cells),
        *_of_drift(cells),
    )


def _of_seeds(cells: Sequence[Cell], baseline: int) -> Iterator[str]:
    fewest = min(len(cell.runs) for cell in cells)
    others = len(cells) - 1
    if fewest < FEWEST:
        yield f"{plural(fewest, 'seed')}: no difference is judged of fewer than {FEWEST}"
    elif fewest < _ENOUGH_SEEDS:
        few, many = (t_critical(freedom, 1 - 0.05 / max(1, others)) for freedom in (fewest - 1, _MANY))
        yield (
            f"{fewest} seeds only: the clearest difference has to be {few:.1f} standard errors large to be "
            f"significant; with many seeds {many:.1f} would do"
        )
    reference = set(cells[baseline].seeds)
    for cell in cells:
        if not reference & set(cell.seeds):
            yield f"{cell.label} has no seed in common with the baseline: compared as groups, which shows less"
        elif reference != set(cell.seeds):
            both = len(reference & set(cell.seeds))
            yield f"{cell.label} and the baseline have {both} seeds in common: they are compared by these only"


def _of_treatments(cells: Sequence[Cell], axes: Sequence[str]) -> Iterator[str]:
    """A line for each value of a setting that chooses samples, along which cells differ, that chose none in any run."""
    for name, (off, words, chosen) in _TREATMENTS.items():
        if name in axes:
            by_value: dict[str, list[Run]] = {}
            for cell in cells:
                if (value := _setting(cell.runs[0].config, name)) not in (off, None):
                    by_value.setdefault(setting_text(value), []).extend(cell.runs)
            for value, runs in by_value.items():
                if not any(chosen(run) for run in runs):
                    yield (
                        f"{name}={value} {words} in any run, so it chose no samples: that its cells learnt something "
                        "else is not its doing"
                    )


def _setting(config: Mapping[str, Any], name: str) -> Any:
    """None where the run has no such setting."""
    group, _, own = name.partition(".")
    return config[group].get(own)


def _of_origin(cells: Sequence[Cell]) -> Iterator[str]:
    runs = [run for cell in cells for run in cell.runs]
    if unchecked := sum(not run.checked for run in runs):
        yield (
            f"{unchecked} of the {len(runs)} runs are of an earlier version, whose DONE does not say what their files "
            "were: they are taken as they are"
        )
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


def _of_outliers(cells: Sequence[Cell], measures: Sequence[Measure]) -> list[str]:
    """Runs far from the others of their cell; of speeds that were measured, not simulated."""
    if cells[0].runs[0].identity.backend == "virtual":
        return []
    speed = next(measure for measure in measures if measure.key == SPEED)
    found = [odd for cell, measured in zip(cells, speed.cells, strict=True) for odd in outlying_runs(cell, measured)]
    farthest = max((distance for _, distance in found), default=0.0)
    many = f"{len(found)} runs are outliers in speed, by up to {farthest:.0%} of the median of their seeds"
    return _few([line for line, _ in found], many)


def outlying_runs(cell: Cell, speed: CellMeasure) -> list[tuple[str, float]]:
    """Runs whose speed is far from those of the cell's other seeds: what to say of each, and how far."""
    seeds, values = list(speed.per_seed), list(speed.per_seed.values())
    first = seeds.index(min(cell.runs, key=lambda run: run.manifest["started_at"]).identity.seed)
    found = []
    for index in outliers(values, least=_SLOW):
        off = values[index] / float(np.median(values)) - 1
        far = f"{abs(off):.0%} {'faster' if off > 0 else 'slower'} than the median of its seeds"
        cold = index == first and off < 0
        which = f"the first run (seed {seeds[index]}) is" if cold else f"seed {seeds[index]} is an outlier,"
        why = ": caches may have been cold" if cold else ""
        found.append((f"{cell.label}: {which} {far}{why}; run it again with force=true", abs(off)))
    return found


def _of_runs(cells: Sequence[Cell]) -> Iterator[str]:
    """Warnings on single runs, a line per cell: otherwise every seed would repeat it."""
    for text, of in _RUN_WARNINGS:
        lines, worst = [], 0.0
        for cell in cells:
            found = {run.identity.seed: value for run in cell.runs if (value := of(run)) is not None}
            if found:
                which = "every seed" if len(found) == len(cell.runs) else listed("seed", list(found))
                lines.append(f"{cell.label}, {which}: {text.format(max(found.values()))}")
                worst = max(worst, *found.values())
        yield from _few(lines, f"{len(lines)} of {len(cells)} cells: {text.format(worst)}")


def _of_faults(cells: Sequence[Cell]) -> Iterator[str]:
    """Warnings of what went wrong in runs, by its metric, a line per cell with the worst of its seeds."""
    found = [{run.identity.seed: faults_of(run) for run in cell.runs} for cell in cells]
    names = dict.fromkeys(fault.name for of_cell in found for faults in of_cell.values() for fault in faults)
    for name in names:
        lines, worst = [], dict[str, float]()
        for cell, of_cell in zip(cells, found, strict=True):
            seeds = {seed: fault for seed, faults in of_cell.items() for fault in faults if fault.name == name}
            if seeds:
                most = max(seeds.values(), key=lambda fault: fault.value)
                which = "every seed" if len(seeds) == len(cell.runs) else listed("seed", list(seeds))
                up_to = "up to " if len({fault.text for fault in seeds.values()}) > 1 else ""
                lines.append(f"{cell.label}, {which}: {up_to}{most.text}")
                worst[most.text] = most.value
        yield from _few(lines, f"{len(lines)} of {len(cells)} cells: up to {max(worst, key=worst.__getitem__)}")


def faults_of(run: Run) -> list[Found]:
    """Faults of a run above their bounds."""
    return found_faults(run.metrics, run.ledger, run.evaluations, run.config)


def withheld_by(cells: Sequence[Cell]) -> list[str]:
    """Faults of runs on which no verdict can stand: a line for each cell, of its worst seed."""
    lines = []
    for cell in cells:
        faults = [fault for run in cell.runs for fault in faults_of(run) if fault.forbids]
        lines += [f"{cell.label}: {max(faults, key=lambda fault: fault.value).text}"] if faults else []
    return _few(lines, f"in {len(lines)} of {len(cells)} cells samples could not be scored (task.failed_bound)")


def _of_drift(cells: Sequence[Cell]) -> list[str]:
    """Cells whose iterations take another time at the end of a run than after warm-up."""
    text = "not steady: iterations at the end take {} times as long as after warm-up"
    lines, changes = [], []
    for cell in cells:
        change = float(np.median([drift(column(run, "time/iteration_s"), warmup(run)) for run in cell.runs]))
        if max(change, 1 / change) > _DRIFTS:
            lines.append(f"{cell.label}: {text.format(f'{change:.2f}')}")
            changes.append(change)
    spread = f"{min(changes):.2f} to {max(changes):.2f}" if changes else ""
    return _few(lines, f"{len(lines)} of {len(cells)} cells: {text.format(spread)}")


def _few(lines: list[str], many: str) -> list[str]:
    """The lines, or one for all of them where they are many."""
    return lines if len(lines) <= _EACH else [many]


def _ahead(run: Run) -> float | None:
    """Share of the samples of the steady part that were finished before it began."""
    if not has_steady_part(len(run.metrics), warmup(run)) or not warmup(run):
        return None
    start = seconds(run)[warmup(run) - 1]
    counted = trained(run, "trained_at") >= start
    share = float(np.mean(trained(run, "finished_at")[counted] < start))
    return share if share > _AHEAD else None


def _dropped(reason: DropReason) -> Callable[[Run], float]:
    return lambda run: float(run.ledger[f"dropped_{reason}"])


def _total(metric: str) -> Callable[[Run], float]:
    return lambda run: float(sum(iteration.get(metric) or 0.0 for iteration in run.metrics))


_TREATMENTS: dict[str, tuple[Any, str, Callable[[Run], float]]] = {
    "schedule.on_stale": ("wait", "dropped nothing", _dropped("stale")),
    "algorithm.filter": ("none", "refused no group", _dropped("filtered")),
    "engine.on_straggler": (
        "wait",
        "ended nothing",
        lambda run: _dropped("straggler")(run) + _total("straggler/cut")(run),
    ),
    "algorithm.rejection": ({}, "left out no token", _total("policy/rejected")),
    "algorithm.mask_truncated": (False, "masked no response", _total("response_length/truncated")),
    "algorithm.max_token_staleness": (None, "masked no token", _total("token_ledger/masked")),
}
"""Settings that choose samples: the value of never, what is said where it never did, and how much it chose."""

_RUN_WARNINGS: tuple[tuple[str, Callable[[Run], float | None]], ...] = (
    (
        "no steady part: the run ends within its {:.0f} warm-up iterations, which its rates now include",
        lambda run: None if has_steady_part(len(run.metrics), warmup(run)) else float(warmup(run)),
    ),
    ("{:.0%} of the samples in the steady part were sampled before it: a longer run may be slower", _ahead),
    (
        "other processes used up to {:.0%} of the machine meanwhile; its times are too long to be judged",
        lambda run: load if (load := others_load(run.manifest) or 0.0) > BUSY else None,
    ),
)
