"""Two kinds of experiments with one unknown, which is fitted to one published figure; then the others are predicted.

`calibrated`: a setting of the workload, fitted to the step of the base. `fitted_ratio`: the ratio of rollout to
training, fitted to a speed-up; in units of the time that a batch takes to generate, on engines that the roofline
describes, training takes 1 / ratio of it, and reference log-probs `reference_share` of that. Each pool of devices that
work together is one device of the simulation, each rollout engine another (as in `make predict`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from functools import partial

import numpy as np
from pydantic.dataclasses import dataclass

from harness.config import STRICT, ConfigError, JobConfig
from harness.config.fields import Count, NotNegative, Positive
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.memory import JobLayout
from harness.cost_model.roofline import roofline
from harness.metrics.tables import Table
from harness.planner.judgement import InTurn, in_system, systems
from harness.prediction.forecast import verdict_of
from harness.prediction.posterior import factors_of, slower
from harness.prediction.simulation import WARMUP, by_token_alone, one_device_each
from harness.rpc.children import parallel_map
from harness.studies.papers.experiment import Context, PaperExperiment
from harness.studies.papers.modes import TIMEOUT_S, Mode, batches_of, composed, job_of, of_role, step_figures, steps
from harness.studies.papers.result import Result, ResultLine, drawn_line, speedup_lines
from harness.studies.papers.simulated import drawn_lines

WITHIN = 0.10  # the error that is promised of a predicted speed-up
_NEAR = 0.003  # of the figure that is fitted to
_TRIES = 12


def fit_unknown(
    simulated: Callable[[float], float], published: float, least: float, most: float, *, halve: bool = False
) -> float | None:
    """The value from `least` to `most`, both above 0, at which `simulated` is `published`, to three thousandths of it.
    None where the figure lies on one side of it at both ends. By false position (the Illinois variant) over the
    logarithm of the value; halve: by bisection. It stops early, as more digits would say nothing: a simulated step is
    not a smooth function of its workload."""

    def error(log_value: float) -> float:
        return math.log(simulated(math.exp(log_value)) / published)

    low, high = math.log(least), math.log(most)
    at_low, at_high = error(low), error(high)
    at, found = min(((low, at_low), (high, at_high)), key=lambda end: abs(end[1]))
    if at_low * at_high > 0:
        return None
    for _ in range(_TRIES):
        if abs(found) <= _NEAR:
            break
        at = low + (0.5 if halve else at_low / (at_low - at_high)) * (high - low)
        found = error(at)
        if found * at_low > 0:
            low, at_low, at_high = at, found, at_high / 2
        else:
            high, at_high, at_low = at, found, at_low / 2
    return math.exp(at)


@dataclass(frozen=True, config=STRICT)
class SettingSweep:
    """A setting over several values, in the mode of this label; the published words on its throughput by value."""

    label: str
    setting: str
    words: dict[str, str]


@dataclass(frozen=True, config=STRICT)
class JobVariation:
    """Other settings of the job, in all modes, to see what the predictions depend on."""

    label: str
    job: list[str]


@dataclass(frozen=True, config=STRICT)
class Calibrated:
    """Settings of experiments with one unknown setting. unknown: looked for between `least` and `most`; with more
    of it a step takes longer. utilisation: the published band by label, as shares."""

    unknown: str
    least: Positive
    most: Positive
    modes: list[Mode]
    within: Positive
    utilisation: dict[str, tuple[NotNegative, NotNegative]] = field(default_factory=dict)
    sweep: SettingSweep | None = None
    variations: list[JobVariation] = field(default_factory=list)


@plain_dataclass(frozen=True)
class SimulatedStep:
    """A simulated step of a mode. Shares of the time in which devices work: of all, and of the busiest pool."""

    step_s: float
    busy: float
    busiest: float


@plain_dataclass(frozen=True)
class FittedUnknown:
    """The modes, at the fitted value of the unknown."""

    value: float
    modes: tuple[SimulatedStep, ...]


def run_calibrated(experiment: PaperExperiment, context: Context) -> Result:
    """Fit to the base, predict the other modes, the sweep, and all modes under each variation."""
    form = experiment.read(Calibrated)
    published = {row["mode"]: float(row["step_s"]) for row in experiment.published()}
    experiment.check_published([mode.label for mode in form.modes], published)
    job, base = experiment.overrides(), of_role(form.modes, "base")
    context.progress(f"fitting {form.unknown}, and simulating {len(form.modes)} ways of working")
    forms = [form]
    for variation in form.variations:
        forms.append(replace(form, modes=[replace(mode, job=[*mode.job, *variation.job]) for mode in form.modes]))
    fit = partial(fit_workload, job, published[base.label])
    fits = parallel_map(fit, forms, processes=context.processes, timeout_s=TIMEOUT_S, what="fits")
    lines = _calibrated_lines(form, published, fits[0].modes)
    notes = [f"fitted to {base.label}: {form.unknown} = {fits[0].value:,.0f}", _order(lines[: len(form.modes)])]
    if form.sweep is not None:
        context.progress(f"simulating {len(form.sweep.words)} values of {form.sweep.setting}")
        lines += _sweep(form.sweep, form.modes, (*job, f"{form.unknown}={fits[0].value}"), context.processes)
    labels = ["as above", *(variation.label for variation in form.variations)]
    lines += drawn_lines(experiment, "sync", None, context)
    return Result(experiment, lines, notes, [_workloads_table(form, labels, fits, published)])


def fit_workload(job: Sequence[str], base_s: float, form: Calibrated) -> FittedUnknown:
    """Fit to a step of the base, and simulate all modes. No other published figure is known here. Raises ConfigError
    where no value of the unknown makes the base take `base_s`."""
    base = of_role(form.modes, "base")

    def base_step_s(value: float) -> float:
        return step_figures(job_of(base, (*job, f"{form.unknown}={value}"))).seconds

    value = fit_unknown(base_step_s, base_s, form.least, form.most, halve=True)
    if value is None:
        raise ConfigError(
            f"no {form.unknown} from {form.least:g} to {form.most:g} makes a step of {base.label} take {base_s:g} s"
        )
    return FittedUnknown(value, tuple(simulate_mode((*job, f"{form.unknown}={value}"), mode) for mode in form.modes))


def simulate_mode(job: Sequence[str], mode: Mode) -> SimulatedStep:
    """A mode after these settings of the job."""
    run = steps(job_of(mode, job))
    return SimulatedStep(run.seconds, run.busy(mode.devices), run.busiest())


def _calibrated_lines(
    form: Calibrated, published: Mapping[str, float], simulated: Sequence[SimulatedStep]
) -> list[ResultLine]:
    step_lines, all_lines, busiest_lines = [], [], []
    for mode, step in zip(form.modes, simulated, strict=True):
        within = form.within if mode.role == "predicted" else None
        low, high = form.utilisation.get(mode.label, (None, None))
        band = None if low is None or high is None else (100 * low, 100 * high)
        step_lines.append(
            ResultLine("seconds per step", mode.label, mode.role, published[mode.label], step.step_s, within=within)
        )
        all_lines.append(ResultLine("devices busy, %", mode.label, "predicted", band, 100 * step.busy))
        busiest_lines.append(ResultLine("busiest pool busy, %", mode.label, "predicted", band, 100 * step.busiest))
    return [*step_lines, *all_lines, *busiest_lines]


def _sweep(sweep: SettingSweep, modes: Sequence[Mode], job: Sequence[str], processes: int) -> list[ResultLine]:
    mode = next(mode for mode in modes if mode.label == sweep.label)
    swept = [replace(mode, job=[*mode.job, f"{sweep.setting}={value}"]) for value in sweep.words]
    found = parallel_map(partial(simulate_mode, job), swept, processes=processes, timeout_s=TIMEOUT_S, what="the sweep")
    name = f"throughput by {sweep.setting}, relative to the first"
    return [
        ResultLine(name, value, "predicted", words, found[0].step_s / step.step_s)
        for (value, words), step in zip(sweep.words.items(), found, strict=True)
    ]


def _workloads_table(
    form: Calibrated, labels: Sequence[str], fits: Sequence[FittedUnknown], published: Mapping[str, float]
) -> Table:
    """A table of what is fitted and predicted under each variation."""
    columns = ["settings", form.unknown]
    for mode in form.modes:
        columns += [f"{mode.label}, s"] + ([] if mode.role == "base" else ["error"])
    rows = []
    for label, fitted in zip(labels, fits, strict=True):
        row = [label, f"{fitted.value:,.0f}"]
        for mode, step in zip(form.modes, fitted.modes, strict=True):
            row.append(f"{step.step_s:.1f}")
            row += [] if mode.role == "base" else [f"{step.step_s / published[mode.label] - 1:+.1%}"]
        rows.append(row)
    return Table("what the predictions depend on", columns, rows)


def _order(lines: Sequence[ResultLine]) -> str:
    """Whether simulated steps come in the published order."""
    by_published = sorted(lines, key=lambda line: float(str(line.published)))
    by_simulated = sorted(lines, key=lambda line: line.simulated or 0.0)
    return f"order of the steps: {'as published' if by_published == by_simulated else 'another'}"


@dataclass(frozen=True, config=STRICT)
class RatioVariation:
    """Other settings of the job, or of the kind, to see what the prediction depends on."""

    label: str
    job: list[str] = field(default_factory=list)
    engines: Count | None = None
    reference_share: Positive | None = None
    modes: dict[str, list[str]] = field(default_factory=dict)  # jobs of modes, by their labels


@dataclass(frozen=True, config=STRICT)
class FittedRatio:
    """Settings of experiments with one unknown ratio. table: its rows have this in the column `experiment`; engines: of
    rollout; least, most: ratios to look among."""

    table: str
    engines: Count
    reference_share: Positive
    least: Positive
    most: Positive
    modes: list[Mode]
    variations: list[RatioVariation] = field(default_factory=list)


@plain_dataclass(frozen=True)
class RatioSetup:
    """The facts that the fit may know: no published figure is among them. system: one that was drawn, but for settings
    that are `given`; None: as the roofline has it."""

    job: tuple[str, ...]
    engines: int
    reference_share: float
    least: float
    most: float
    modes: tuple[Mode, ...]
    system: Mapping[str, float] | None = None
    given: frozenset[str] = frozenset()


@plain_dataclass(frozen=True)
class FittedSpeedups:
    """Speedups by a fitted ratio. speedups: over the mode of role `base`, by label. ratio: None where no ratio gives
    the fitted speed-up, which is then the nearest that there is."""

    ratio: float | None
    speedups: Mapping[str, float]


def run_fitted_ratio(experiment: PaperExperiment, context: Context) -> Result:
    """Fit and predict; then the same under each variation, and in each system drawn."""
    form = experiment.read(FittedRatio)
    rows = experiment.published(experiment=form.table)
    published = {row["configuration"]: float(row["relative_throughput"]) for row in rows}
    experiment.check_published([mode.label for mode in form.modes], published)
    fitted_to = published[of_role(form.modes, "fitted").label]
    variations = [RatioVariation("as above"), *form.variations]
    setups = [ratio_setup(experiment.overrides(), form, variation) for variation in variations]
    drawn = systems(composed(of_role(form.modes, "base"), setups[0].job))
    own = [replace(setups[0], system=system, given=experiment.given) for system in drawn]
    context.progress(f"fitting and predicting, {len(setups)} times, and in {len(own)} systems drawn")
    fit, every = partial(fit_ratio, fitted_to), [*setups, *own]
    found = parallel_map(fit, every, processes=context.processes, timeout_s=TIMEOUT_S, what="ratios to be fitted")
    fits, reached = found[: len(setups)], [one for one in found[len(setups) :] if one.ratio is not None]
    main = fits[0]
    lines = [
        ResultLine(
            "throughput, relative to the first",
            mode.label,
            mode.role,
            published[mode.label],
            main.speedups[mode.label],
            within=WITHIN if mode.role == "predicted" else None,
        )
        for mode in form.modes
    ]
    table = _ratios_table([variation.label for variation in variations], fits, form.modes, published)
    ratio = "no ratio gives it" if main.ratio is None else f"rollout : training = {main.ratio:.2f} : 1"
    notes = [f"fitted to {fitted_to:g}: {ratio}", f"{len(reached)} of {len(own)} systems drawn reach {fitted_to:g}"]
    return Result(experiment, [*lines, *_drawn_lines(form.modes, reached, published)], notes, [table])


def _drawn_lines(
    modes: Sequence[Mode], fits: Sequence[FittedSpeedups], published: Mapping[str, float]
) -> list[ResultLine]:
    """Lines of what is predicted in systems drawn, each fitted by itself, and of how much faster than the fitted mode
    that is; none where fewer than two can be fitted."""
    if len(fits) < 2:
        return []
    name, fitted = "throughput, relative to the first, in systems drawn", of_role(modes, "fitted").label
    speedups = {
        mode.label: np.array([fit.speedups[mode.label] for fit in fits]) for mode in modes if mode.role == "predicted"
    }
    beside = {label: draws / np.array([fit.speedups[fitted] for fit in fits]) for label, draws in speedups.items()}
    lines = [
        drawn_line(name, label, draws, published=published[label], verdict=verdict_of(draws))
        for label, draws in speedups.items()
    ]
    return lines + speedup_lines(beside, fitted)


def ratio_setup(job: Sequence[str], form: FittedRatio, variation: RatioVariation) -> RatioSetup:
    """The setup of a fit in a variation of the experiment."""
    modes = tuple(replace(mode, job=variation.modes.get(mode.label, mode.job)) for mode in form.modes)
    share = variation.reference_share or form.reference_share
    engines = variation.engines or form.engines
    return RatioSetup((*job, *variation.job), engines, share, form.least, form.most, modes)


def fit_ratio(fitted_to: float, setup: RatioSetup) -> FittedSpeedups:
    """The ratio for which the fitted mode is `fitted_to` times as fast as the base, and how fast all modes are then.
    From `least` on, the longer rollout takes against the two others, the less there is to overlap: the speed-up
    falls."""
    simulation = RatioSimulation(setup)
    mode = of_role(setup.modes, "fitted")
    ratio = fit_unknown(partial(simulation.speedup, mode), fitted_to, setup.least, setup.most)
    nearest = ratio or min(
        setup.least, setup.most, key=lambda end: abs(math.log(simulation.speedup(mode, end) / fitted_to))
    )
    return FittedSpeedups(ratio, {mode.label: simulation.speedup(mode, nearest) for mode in setup.modes})


class RatioSimulation:
    """How much faster than the base a mode is, at a ratio. The base does one task at a time, so that its step is what
    its tasks take: only its rollout and its weight transfer are simulated."""

    def __init__(self, setup: RatioSetup) -> None:
        self._setup = setup
        self._base = of_role(setup.modes, "base")
        self._base_s = step_figures(ratio_job(setup, self._base, train_s=0.0)).seconds
        self._known: dict[tuple[str, float], float] = {}

    def speedup(self, mode: Mode, ratio: float) -> float:
        """Speedup of a mode over the base. What was simulated once is not simulated again."""
        if mode == self._base:
            return 1.0
        if (mode.label, ratio) not in self._known:
            train_s = self._base_s / ratio
            sequential_s = self._base_s + (1 + self._setup.reference_share) * train_s
            beside = None
            if self._setup.system is not None:
                beside = InTurn.of(self._setup.system, sequential_s, self._base_s, devices=1)
                sequential_s += beside.before_s + beside.serial_s + beside.hidden_s
            seconds = step_figures(ratio_job(self._setup, mode, train_s, beside)).seconds
            self._known[mode.label, ratio] = sequential_s / seconds
        return self._known[mode.label, ratio]


def ratio_job(setup: RatioSetup, mode: Mode, train_s: float, beside: InTurn | None = None) -> JobConfig:
    """A mode's job, whose training takes so long for a batch. beside: what surrounds the base, in a system drawn."""
    config, q = composed(mode, setup.job), setup.system
    config = config if q is None else in_system(config, q, setup.given)
    layout = JobLayout(engine_devices=config.engine.tensor_parallel)
    cost = roofline(config.model, config.device, factors_of(config), layout)
    batches, algorithm = batches_of(config), config.algorithm
    lengths = ResponseLengths(cost.lengths, 0, algorithm.group_size, algorithm.batch_samples)
    tokens = lengths.batches(WARMUP, batches, algorithm.batch_samples).sum() / batches
    tokens += algorithm.batch_samples * cost.prompt_tokens
    if q is not None:
        cost = slower(cost, q["engine_time"])
    cost = by_token_alone(cost, train_s / tokens, setup.reference_share * train_s / tokens)
    if q is not None:
        cost = (beside or InTurn.of(q, 0.0, 0.0, devices=1)).around(config, cost, q)
    return replace(
        one_device_each(config, {"rollout": setup.engines, "actor": 1, "reference": 1}),
        algorithm=replace(config.algorithm, reference=True, recompute_log_probs=False),
        cost=cost,
    )


def _ratios_table(
    labels: Sequence[str], fits: Sequence[FittedSpeedups], modes: Sequence[Mode], published: Mapping[str, float]
) -> Table:
    """The fit and the predictions under each variation, with the errors of what is predicted."""
    predicted = [mode for mode in modes if mode.role == "predicted"]
    fitted = of_role(modes, "fitted")
    columns = ["settings", "rollout : training", f"{fitted.label} (fitted)"]
    for mode in predicted:
        columns += [mode.label, "error"]
    rows = []
    for label, fit in zip(labels, fits, strict=True):
        row = [label, "not reached" if fit.ratio is None else f"{fit.ratio:.2f}", f"{fit.speedups[fitted.label]:.2f}"]
        for mode in predicted:
            error = fit.speedups[mode.label] / published[mode.label] - 1
            row += [f"{fit.speedups[mode.label]:.2f}", "" if fit.ratio is None else f"{error:+.1%}"]
        rows.append(row)
    return Table("what the prediction depends on", columns, rows)
