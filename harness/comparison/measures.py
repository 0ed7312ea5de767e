"""The measures of a comparison: how a run gives each of them, and what each cell is against the baseline."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harness.comparison.runs import Cell, Run
from harness.comparison.selection import (
    discarded_lag,
    discarded_tokens,
    length_distance,
    length_ratio,
    reward_distance,
    reward_gap,
    selects,
)
from harness.comparison.statistics import (
    MARGIN,
    Difference,
    Interval,
    PerSeed,
    corrected,
    crossing,
    group_difference,
    group_ratio,
    iqm_interval,
    mean_interval,
    paired_difference,
    paired_ratio,
    probability_of_improvement,
    steady_rate,
)
from harness.config.placement import HOST_ROLES
from harness.metrics.definitions import CUSTOM, Better, definition

SPEED = "throughput/samples_per_s"
EXACT_MATCH = "reward/exact_match"
GOOD, GOOD_RATE = "reward/correct_and_complete", "throughput/correct_samples_per_s"
LAG = "staleness/mean"
HELD_OUT = {key: definition(key).title for key in ("eval/sampled", "eval/greedy", "eval/pass_at_k")}
"""Metrics of runs that were evaluated (`eval.every`), and how each is called."""
OUTCOMES = ("eval/sampled", "eval/greedy", EXACT_MATCH)
"""Measures of what was learnt, the best first: of the policy itself; of its likeliest responses; of the samples that
were trained, which other policies sampled and a treatment may have chosen.

Speed and the first of these that all runs have are the two questions of a comparison. The differences of each are a
family of their own; all others are one together, so that the more is measured, the more it takes to call any of it a
difference."""

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Thresholds of held-out accuracy. Shown are those that some run reaches and not every run has from the start."""

_END = 10  # the end of a run is its last tenth
_SMOOTH = 20  # running means span a twentieth of a run
_LEAST_FOR_IQM = 4  # seeds
_SHARE = (0.0, 1.0)
_POSITIVE = (0.0, math.inf)
_ANY = (-math.inf, math.inf)
_TIMED = ("throughput/", "seconds", "reach/seconds/", "idle/", "time/")


@dataclass(frozen=True)
class Metric:
    """key: as in `throughput/samples_per_s`; `reach/samples/0.8` and `reach/seconds/0.8` are what that accuracy
    takes. better: None where neither is; compared: whether cells are compared by difference or by ratio."""

    key: str
    title: str
    unit: str
    better: Better | None
    compared: Literal["difference", "ratio"]


@dataclass(frozen=True)
class MetricDefinition(Metric):
    """A metric and how a run gives it. of: its value for a run, infinite where it never got there. range: of values."""

    of: Callable[[Run], float]
    range: tuple[float, float] = _POSITIVE
    alike: Callable[[Run], object] = lambda run: None
    """Cells are held against the baseline only where their runs have this in common."""


@dataclass(frozen=True)
class CellMeasure:
    """One measure of one cell.

    per_seed: a value per seed; infinite where a seed never got there. interval: of the mean over seeds, None where a
    value is infinite (there is no mean then); its bounds are infinite where there is one seed. iqm: interquartile mean
    with a bootstrap interval, None likewise and below four seeds.
    difference, ratio: to the baseline, by seed; ratio is None where a value is not positive. Both are `distinguishable`
    only where Holm's correction of their family of measures and cells leaves them so.
    better: probability that a run of this cell is better than one of the baseline. All three are None for the baseline
    itself, and where they cannot be had."""

    per_seed: PerSeed
    interval: Interval | None = None
    iqm: Interval | None = None
    difference: Difference | None = None
    ratio: Difference | None = None
    better: Interval | None = None

    @property
    def reached(self) -> int:
        """Seeds whose value is finite."""
        return sum(math.isfinite(value) for value in self.per_seed.values())

    @property
    def value(self) -> float:
        """The mean over seeds; the median where a seed never got there: infinite if half of them or more did not."""
        values = np.array(list(self.per_seed.values()))
        return float(np.mean(values) if np.isfinite(values).all() else np.median(values))


@dataclass(frozen=True)
class Measure(Metric):
    """A metric of every cell, in their order. margin: difference that does not matter, as a share."""

    cells: tuple[CellMeasure, ...]
    margin: float = MARGIN

    @property
    def margin_text(self) -> str:
        """The difference that does not matter: `2 %`, or of a share `2 points`."""
        return f"{100 * self.margin:g} {'%' if self.compared == 'ratio' else 'points'}"

    def against_baseline(self, cell: int) -> Difference | None:
        """The cell's ratio to the baseline, or its difference, as `compared` says; None where it has none."""
        return self.cells[cell].ratio if self.compared == "ratio" else self.cells[cell].difference


def measures_of(cells: Sequence[Cell], baseline: int, margin: float = MARGIN) -> tuple[Measure, ...]:
    """Every metric that all these runs give, against the cell of index `baseline`; what is called a difference, or
    equal within `margin`, is so after Holm's correction of its family. Of fewer than three seeds nothing is called, nor
    of times while other processes kept the machine busy."""
    return tuple(_by_family(_uncorrected(cells, baseline, margin)))


def outcome_of(measures: Sequence[Measure]) -> str | None:
    """The key of the measure that says what was learnt, the best of those in which all cells are held against the
    baseline; None where nothing was rewarded."""
    compared = {measure.key for measure in measures if sum(cell.difference is None for cell in measure.cells) <= 1}
    return next((key for key in OUTCOMES if key in compared), None)


def of_trained_samples(key: str) -> bool:
    """Whether a measure is of the rewards of samples that were trained."""
    return key.startswith("reward/") or key == GOOD_RATE


def measures_of_pairs(pairs: Sequence[tuple[Cell, Cell]], margin: float = MARGIN) -> list[tuple[Measure, ...]]:
    """Measures of each pair, that its runs give: the second cell against the first. Families go over all pairs."""
    each = [_uncorrected(pair, 0, margin) for pair in pairs]
    called = iter(_by_family([measure for measures in each for measure in measures]))
    return [tuple(next(called) for _ in measures) for measures in each]


def _uncorrected(cells: Sequence[Cell], baseline: int, margin: float) -> list[Measure]:
    runs = [run for cell in cells for run in cell.runs]
    return [_measure(metric, cells, baseline, margin) for metric in metric_definitions(runs)]


def _by_family(measures: Sequence[Measure]) -> list[Measure]:
    """The measures, with what Holm's correction leaves to be called: of each question, and of all others together."""
    found = list(measures)
    questions = (SPEED, outcome_of(measures))  # of pairs, of the first that all have
    families = [[index for index, measure in enumerate(found) if measure.key == key] for key in questions]
    families.append([index for index, measure in enumerate(found) if measure.key not in questions])
    for family in families:
        for index, measure in zip(family, _corrected([found[index] for index in family]), strict=True):
            found[index] = measure
    return found


def _measure(metric: MetricDefinition, cells: Sequence[Cell], baseline: int, margin: float) -> Measure:
    per_cell: list[PerSeed] = [{run.identity.seed: metric.of(run) for run in cell.runs} for cell in cells]
    like = metric.alike(cells[baseline].runs[0])
    measured = [
        _alone(metric, values)
        if index == baseline or metric.alike(cells[index].runs[0]) != like
        else _compared(metric, values, per_cell[baseline], margin)
        for index, values in enumerate(per_cell)
    ]
    if metric.key.startswith(_TIMED):
        base = cells[baseline].is_busy
        measured = [_unjudged(one) if base or cell.is_busy else one for one, cell in zip(measured, cells, strict=True)]
    return Measure(metric.key, metric.title, metric.unit, metric.better, metric.compared, tuple(measured), margin)


def _unjudged(cell: CellMeasure) -> CellMeasure:
    difference, ratio = (both and both.unjudged for both in (cell.difference, cell.ratio))
    return replace(cell, difference=difference, ratio=ratio)


def _alone(metric: MetricDefinition, per_seed: PerSeed) -> CellMeasure:
    values = list(per_seed.values())
    if not np.isfinite(values).all():
        return CellMeasure(per_seed)
    iqm = iqm_interval([values]) if len(values) >= _LEAST_FOR_IQM else None
    return CellMeasure(per_seed, mean_interval(values).within(*metric.range), iqm)


def _compared(metric: MetricDefinition, values: PerSeed, baseline: PerSeed, margin: float) -> CellMeasure:
    """A cell's measure against the baseline: by seed where the two share any. An infinity has a rank, and neither a
    difference nor a ratio. A difference has a margin where values are shares."""
    alone = _alone(metric, values)
    if metric.better is not None:
        sides = [np.array(list(side.values())) for side in (values, baseline)]
        better = probability_of_improvement(*(sides if metric.better == "higher" else reversed(sides)))
        alone = replace(alone, better=better)
    everything = [*values.values(), *baseline.values()]
    if not np.isfinite(everything).all():
        return alone
    ratio = ratio_of(values, baseline, margin) if min(everything) > 0 else None
    of_difference = margin if metric.range == _SHARE else None
    if values.keys() & baseline.keys():
        return replace(alone, difference=paired_difference(values, baseline, of_difference), ratio=ratio)
    difference = group_difference([*values.values()], [*baseline.values()], of_difference)
    return replace(alone, difference=difference, ratio=ratio)


def ratio_of(values: PerSeed, others: PerSeed, margin: float | None = None) -> Difference:
    """The ratio of two cells' values: by seed where they share any. Raises ValueError where one is not positive."""
    if values.keys() & others.keys():
        return paired_ratio(values, others, margin)
    return group_ratio([*values.values()], [*others.values()], margin)


def _corrected(family: Sequence[Measure]) -> list[Measure]:
    """The measures, with what Holm leaves of their differences; difference and ratio of a cell are called alike."""
    places = [(m, c) for m, measure in enumerate(family) for c in range(len(measure.cells))]
    compared = {(m, c): found for m, c in places if (found := family[m].against_baseline(c)) is not None}
    left = corrected(list(compared.values()))
    called = dict(zip(compared, left, strict=True))
    return [
        replace(measure, cells=tuple(_called(cell, called.get((m, c))) for c, cell in enumerate(measure.cells)))
        for m, measure in enumerate(family)
    ]


def _called(cell: CellMeasure, called: Difference | None) -> CellMeasure:
    differs, equal = (called.distinguishable, called.equal) if called is not None else (False, False)
    difference, ratio = (
        d and replace(d, distinguishable=d.distinguishable and differs, equal=d.equal and equal)
        for d in (cell.difference, cell.ratio)
    )
    return replace(cell, difference=difference, ratio=ratio)


def metric_definitions(runs: Sequence[Run]) -> list[MetricDefinition]:
    """Metrics that every one of these runs can give: simulated ones have no rewards, other versions other metrics."""
    metrics = [
        _rate(SPEED, trained_per_iteration),
        _rate("throughput/tokens_per_s", tokens),
        MetricDefinition(
            "seconds", "whole run, warm-up included", "s", "lower", "ratio", lambda run: float(seconds(run)[-1])
        ),
        _share(
            "throughput/fraction_of_bound",
            definition("throughput/fraction_of_bound").title,
            "higher",
            lambda run: run.timeline.fraction_of_bound(),
        ),
    ]
    metrics += [
        replace(_share(key, f"{title}, last version", "higher", last_evaluated(key)), alike=_evaluated_by(key))
        for key, title in held_out(runs).items()
    ]
    metrics += _thresholds(runs)
    if rewarded(runs):
        metrics += [
            _share(EXACT_MATCH, "exact match of the samples trained last", "higher", at_end(EXACT_MATCH)),
            MetricDefinition(
                *("reward/mean", "mean reward of the samples trained last", "", "higher", "difference"),
                *(at_end("reward/mean"), _ANY),
            ),
            _share(f"{EXACT_MATCH}/run", "exact match of all samples trained", "higher", _mean(EXACT_MATCH)),
        ]
    if in_every_iteration(runs, GOOD):
        metrics += [
            _share(GOOD, f"{definition(GOOD).title}, of all iterations", "higher", _mean(GOOD)),
            _rate(GOOD_RATE, lambda run: column(run, GOOD) * trained_per_iteration(run)),
        ]
    metrics += [
        _declared(LAG, _lag_mean),
        _declared("staleness/max", _lag_worst),
        *_in_steps(runs),
        _declared("response_length/mean", _mean("response_length/mean")),
        *(_declared(key, _mean(key)) for key in OF_TRAINING if in_every_iteration(runs, key)),
        *_of_caches(runs),
    ]
    sync = "time/weight_sync_exposed_s"
    if in_every_iteration(runs, sync):
        metrics.append(replace(_declared(sync, _mean(sync)), better=definition(sync).better))
    if any(run.ledger["dropped_stale"] for run in runs):
        metrics.append(
            _share(
                *("ledger/dropped_stale", "dropped as stale", "lower"),
                lambda run: run.ledger["dropped_stale"] / run.ledger["admitted"],
            )
        )
    metrics += _of_selection(runs)
    metrics += [
        replace(
            _share(f"idle/{role}", f"idle, devices of {role}", "lower", lambda run, role=role: run.timeline.idle(role)),
            alike=_pool_of(role),
        )
        for role in _device_roles(runs)
    ]
    return metrics + [
        MetricDefinition(key, f"{key.removeprefix(CUSTOM)} at the end", "", None, "difference", at_end(key), _ANY)
        for key in custom_metrics(runs)
    ]


OF_TRAINING = (
    "policy/kl_behaviour",
    "policy/effective_samples",
    "policy/left_out",
    "policy/cut",
    "token_ledger/masked",
    "response_length/truncated",
    "reward/same_in_group",
    "train/rank_imbalance",
    "time/wait_for_slowest_rank_s",
    "filter/share",
)
"""Means over all iterations."""


def _of_selection(runs: Sequence[Run]) -> list[MetricDefinition]:
    """Trained samples against completed ones, where some run did not train all of these."""
    if not any(selects(run) for run in runs):
        return []
    metrics = [
        _share("selection/tokens_discarded", "tokens of responses that were dropped", "lower", discarded_tokens),
        _neutral("selection/length_ratio", "length, trained over completed", "", length_ratio),
        _share("selection/length_distance", "KS distance of lengths, trained to completed", "lower", length_distance),
    ]
    if not any(math.isnan(reward_gap(run)) for run in runs):
        title = "mean reward, trained less completed"
        metrics.append(MetricDefinition("selection/reward_gap", title, "", None, "difference", reward_gap, _ANY))
        title = "KS distance of rewards, trained to completed"
        metrics.append(_share("selection/reward_distance", title, "lower", reward_distance))
    if not any(math.isnan(discarded_lag(run)) for run in runs):
        metrics.append(_neutral("selection/lag_discarded", "mean lag of discarded tokens", "iterations", discarded_lag))
    return metrics


def _of_caches(runs: Sequence[Run]) -> list[MetricDefinition]:
    """The age of caches beside that of tokens, where some run kept any over new weights."""
    key = "staleness/cache_mean"
    kept = in_every_iteration(runs, key) and any(run.config["engine"].get("keep_cache") for run in runs)
    return [_declared(key, _mean(key))] if kept else []


def _in_steps(runs: Sequence[Run]) -> list[MetricDefinition]:
    """The lags once more, where a version is made by several optimizer steps."""
    if all(_steps_per_version(run) == 1 for run in runs):
        return []
    steps = _steps_per_version
    return [
        _declared("staleness/steps_mean", lambda run: steps(run) * _lag_mean(run)),
        _declared("staleness/steps_max", lambda run: steps(run) * _lag_worst(run)),
    ]


def _steps_per_version(run: Run) -> int:
    """Optimizer steps of a version; one for a run whose settings say nothing of it."""
    algorithm = run.config["algorithm"]
    return int(algorithm.get("mini_batches", 1) * algorithm.get("epochs", 1))


def custom_metrics(runs: Sequence[Run]) -> list[str]:
    """Names of the extra values of scores that every run has in some iteration."""
    per_run = [{key for iteration in run.metrics for key in iteration if key.startswith(CUSTOM)} for run in runs]
    return sorted(set.intersection(*per_run))


def in_every_iteration(runs: Sequence[Run], key: str) -> bool:
    """Whether all iterations of these runs have this metric."""
    return all(key in iteration for run in runs for iteration in run.metrics)


def rewarded(runs: Sequence[Run]) -> bool:
    """Whether these runs have rewards."""
    return in_every_iteration(runs, EXACT_MATCH)


def column(run: Run, key: str) -> np.ndarray:
    """float64 [iterations]: a metric of every iteration."""
    return np.array([iteration[key] for iteration in run.metrics], dtype=np.float64)


def seconds(run: Run) -> np.ndarray:
    """float64 [iterations]: the run's clock at the end of each."""
    return column(run, "seconds")


def tokens(run: Run) -> np.ndarray:
    """float64 [iterations]: prompt and response tokens that each trained."""
    return column(run, "throughput/tokens_per_s") * column(run, "time/iteration_s")


def trained_per_iteration(run: Run) -> np.ndarray:
    """float64 [iterations]: samples that each trained."""
    return np.diff(column(run, "samples"), prepend=0.0)


def warmup(run: Run) -> int:
    """Iterations left out of rates."""
    return int(run.config["warmup_iterations"])


def smoothing(run: Run) -> int:
    """Iterations that running means span: a twentieth of the run."""
    return max(1, len(run.metrics) // _SMOOTH)


def at_end(key: str) -> Callable[[Run], float]:
    """The mean of a metric over the last tenth (at least one) of the iterations that have it, all weighing the same."""

    def of(run: Run) -> float:
        values = [iteration[key] for iteration in run.metrics if key in iteration]
        return float(np.mean(values[-math.ceil(len(values) / _END) :]))

    return of


def trained(run: Run, name: str) -> np.ndarray:
    """A column of samples.parquet, of the samples that were trained."""
    fates = run.samples.column("fate").to_numpy(zero_copy_only=False)
    return run.samples.column(name).to_numpy(zero_copy_only=False)[fates == "trained"]


def held_out(runs: Sequence[Run]) -> dict[str, str]:
    """Metrics of `HELD_OUT` that were found of the final policy of each run."""
    return {key: title for key, title in HELD_OUT.items() if all(_is_evaluated(run, key) for run in runs)}


def _is_evaluated(run: Run, key: str) -> bool:
    last = run.evaluations[-1] if run.evaluations else {"version": -1}
    return last["version"] == len(run.metrics) and last[key.removeprefix("eval/")] is not None


def last_evaluated(key: str) -> Callable[[Run], float]:
    """The value of the final policy."""
    return lambda run: float(run.evaluations[-1][key.removeprefix("eval/")])


def _evaluated_by(key: str) -> Callable[[Run], object]:
    """A function of what two runs have in common where their policies had the same problems, sampled alike."""
    temperature = 0 if key == "eval/greedy" else None

    def of(run: Run) -> object:
        last, algorithm = run.evaluations[-1], run.config["algorithm"]
        return (last["problems"], *((last["k"], algorithm["temperature"]) if temperature is None else ()))

    return of


def evaluations_along(run: Run, key: str, along: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [evaluations] each: where on an axis a version was evaluated, and the value. along: [iterations], where
    each iteration ended, which made a version."""
    after = np.concatenate(([0.0], along))
    versions = [found["version"] for found in run.evaluations]
    return after[versions], np.array([found[key.removeprefix("eval/")] for found in run.evaluations], np.float64)


def _share(key: str, title: str, better: Better, of: Callable[..., float]) -> MetricDefinition:
    return MetricDefinition(key, title, "", better, "difference", of, _SHARE)


def _neutral(key: str, title: str, unit: str, of: Callable[[Run], float]) -> MetricDefinition:
    return MetricDefinition(key, title, unit, None, "difference", of)


def _declared(key: str, of: Callable[[Run], float]) -> MetricDefinition:
    return _neutral(key, definition(key).title, definition(key).unit, of)


def _rate(key: str, amounts: Callable[[Run], np.ndarray]) -> MetricDefinition:
    """An amount per second after warm-up. amounts: float64 [iterations], what each made."""
    metric = definition(key)

    def of(run: Run) -> float:
        return steady_rate(seconds(run), amounts(run), warmup(run))

    return MetricDefinition(key, metric.title, metric.unit, metric.better, "ratio", of)


def _mean(key: str) -> Callable[[Run], float]:
    return lambda run: float(np.mean(column(run, key)))


def _lag_mean(run: Run) -> float:
    return float(np.mean(trained(run, "lag_mean")))


def _lag_worst(run: Run) -> float:
    return float(np.max(trained(run, "lag_worst")))


def _pool_of(role: str) -> Callable[[Run], object]:
    """The roles that share a role's devices, which are idle when none of them works; and how many devices."""

    def of(run: Run) -> object:
        placed = run.timeline.placement
        devices = {device for (other, _), place in placed.items() if other == role for device in place.devices}
        return {other for (other, _), place in placed.items() if devices & set(place.devices)}, len(devices)

    return of


def _device_roles(runs: Sequence[Run]) -> list[str]:
    """Roles that every run has on devices."""
    shared = set.intersection(*(set(run.timeline.roles) for run in runs)) - set(HOST_ROLES)
    return [role for role in runs[0].timeline.roles if role in shared]


def _thresholds(runs: Sequence[Run]) -> list[MetricDefinition]:
    """Samples and seconds to each accuracy of the policy, where all were evaluated before they were trained."""
    key = next(iter(held_out(runs)), None)
    if key is None or any(run.evaluations[0]["version"] for run in runs):
        return []
    metrics = []
    for threshold in THRESHOLDS:
        reached = [_reach(key, "samples", threshold)(run) for run in runs]
        if min(reached) < math.inf and max(reached) > 0:
            for axis, unit in (("samples", "samples"), ("seconds", "s")):
                title = f"{axis} to held-out accuracy {threshold:g}"
                name, of = f"reach/{axis}/{threshold:g}", _reach(key, axis, threshold)
                metrics.append(MetricDefinition(name, title, unit, "lower", "ratio", of, alike=_evaluated_by(key)))
    return metrics


def _reach(key: str, axis: str, threshold: float) -> Callable[[Run], float]:
    return lambda run: crossing(*evaluations_along(run, key, column(run, axis)), threshold)


def summary_of(run: Run) -> dict[str, float]:
    """Values of a run by the keys of measures: rates after warm-up, shares of idle time, what was learnt. An accuracy
    that was never reached is left out."""
    values = {metric.key: metric.of(run) for metric in metric_definitions([run])}
    return {key: value for key, value in values.items() if math.isfinite(value)}
