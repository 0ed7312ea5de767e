"""One unknown of the workload fitted to the step of the base; the steps of the other ways of working predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from functools import partial

from pydantic.dataclasses import dataclass

from harness.config import STRICT, ConfigError
from harness.config.fields import NotNegative, Positive
from harness.runtime.parallel import parallel_map
from harness.studies.papers.experiment import PaperExperiment
from harness.studies.papers.modes import Mode, job_of, of_role, steps
from harness.studies.papers.result import Line, Result, Table
from harness.studies.papers.surroundings import Surroundings
from harness.studies.papers.utilisation import busy_of_all, busy_of_busiest

_NEAR = 0.003  # of the step that is fitted to
_TRIES = 14
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, config=STRICT)
class Sweep:
    """A setting over several values, in the mode of this label; the published words on its throughput by value."""

    label: str
    setting: str
    words: dict[str, str]


@dataclass(frozen=True, config=STRICT)
class Variation:
    """Other settings of the job, in all modes, to see what the predictions depend on."""

    label: str
    job: list[str]


@dataclass(frozen=True, config=STRICT)
class Calibrated:
    """unknown: a setting, looked for between `least` and `most`; with more of it a step takes longer. utilisation: the
    published band by label, as shares."""

    unknown: str
    least: Positive
    most: Positive
    modes: list[Mode]
    within: Positive
    utilisation: dict[str, tuple[NotNegative, NotNegative]] = field(default_factory=dict)
    sweep: Sweep | None = None
    variations: list[Variation] = field(default_factory=list)


@plain_dataclass(frozen=True)
class Outcome:
    """Of a mode that was simulated. Shares of the time in which devices work: of all, and of the busiest pool."""

    step_s: float
    busy: float
    busiest: float


@plain_dataclass(frozen=True)
class Fitted:
    """The modes, at the fitted value of the unknown."""

    value: float
    outcomes: tuple[Outcome, ...]


def run(experiment: PaperExperiment, around: Surroundings) -> Result:
    """Fit to the base, predict the other modes, the sweep, and all modes under each variation."""
    form, published = experiment.read(Calibrated), _published(experiment)
    experiment.check_published([mode.label for mode in form.modes], published)
    job, base_s = experiment.overrides(), published[of_role(form.modes, "base").label]
    around.told(f"fitting {form.unknown}, and simulating {len(form.modes)} ways of working")
    forms = [form, *(varied(form, its) for its in form.variations)]
    call = partial(fit_and_predict, job, base_s)
    told = parallel_map(call, forms, processes=around.processes, timeout_s=_TIMEOUT_S, what="fits")
    main = told[0]
    lines = _lines(form, published, main.outcomes)
    if form.sweep is not None:
        around.told(f"simulating {len(form.sweep.words)} values of {form.sweep.setting}")
        swept = _swept(form, form.sweep)
        call_one = partial(simulated, (*job, f"{form.unknown}={main.value}"))
        found = parallel_map(call_one, swept, processes=around.processes, timeout_s=_TIMEOUT_S, what="the sweep")
        lines += _sweep_lines(form.sweep, found)
    note = f"fitted to {of_role(form.modes, 'base').label}: {form.unknown} = {main.value:,.0f}"
    labels = ["as above", *(its.label for its in form.variations)]
    table = _variations(form, labels, told, published)
    return Result(experiment, lines, [note, *_order(form, lines)], [table])


def varied(form: Calibrated, its: Variation) -> Calibrated:
    """The same with other settings in all modes."""
    return replace(form, modes=[replace(mode, job=[*mode.job, *its.job]) for mode in form.modes])


def fit_and_predict(job: Sequence[str], base_s: float, form: Calibrated) -> Fitted:
    """Fit to a step of the base, and simulate all modes. No other published figure is known here."""
    value = fit(form, job, base_s)
    return Fitted(value, tuple(simulated((*job, f"{form.unknown}={value}"), mode) for mode in form.modes))


def fit(form: Calibrated, job: Sequence[str], step_s: float) -> float:
    """The value of the unknown at which a step of the base takes `step_s`. Raises ConfigError where none does."""
    base = of_role(form.modes, "base")

    def off(value: float) -> float:
        return math.log(steps(job_of(base, (*job, f"{form.unknown}={value}"))).seconds / step_s)

    low, high = form.least, form.most
    if off(low) > 0 or off(high) < 0:
        raise ConfigError(f"no {form.unknown} from {low:g} to {high:g} makes a step of {base.label} take {step_s:g} s")
    for _ in range(_TRIES):
        value = math.sqrt(low * high)
        found = off(value)
        if abs(found) <= _NEAR:
            break
        low, high = (low, value) if found > 0 else (value, high)
    return value


def simulated(job: Sequence[str], mode: Mode) -> Outcome:
    """A mode after these settings of the job."""
    its = steps(job_of(mode, job))
    return Outcome(its.seconds, busy_of_all(its, mode.devices), busy_of_busiest(its))


def _published(experiment: PaperExperiment) -> dict[str, float]:
    return {row["mode"]: float(row["step_s"]) for row in experiment.published()}


def _swept(form: Calibrated, its: Sweep) -> list[Mode]:
    mode = next(mode for mode in form.modes if mode.label == its.label)
    return [replace(mode, job=[*mode.job, f"{its.setting}={value}"]) for value in its.words]


def _lines(form: Calibrated, published: Mapping[str, float], outcomes: Sequence[Outcome]) -> list[Line]:
    steps_of, all_of, busiest_of = [], [], []
    for mode, its in zip(form.modes, outcomes, strict=True):
        within = form.within if mode.role == "predicted" else None
        band = _percent(form.utilisation.get(mode.label))
        steps_of.append(
            Line("seconds per step", mode.label, mode.role, published[mode.label], its.step_s, within=within)
        )
        all_of.append(Line("devices busy, %", mode.label, "predicted", band, 100 * its.busy))
        busiest_of.append(Line("busiest pool busy, %", mode.label, "predicted", band, 100 * its.busiest))
    return [*steps_of, *all_of, *busiest_of]


def _percent(band: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if band is None else (100 * band[0], 100 * band[1])


def _sweep_lines(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Line]:
    name, first_s = f"throughput by {sweep.setting}, relative to the first", outcomes[0].step_s
    return [
        Line(name, value, "predicted", words, first_s / its.step_s)
        for (value, words), its in zip(sweep.words.items(), outcomes, strict=True)
    ]


def _variations(
    form: Calibrated, labels: Sequence[str], found: Sequence[Fitted], published: Mapping[str, float]
) -> Table:
    """What is fitted and predicted under each variation."""
    columns = ["settings", form.unknown]
    for mode in form.modes:
        columns += [f"{mode.label}, s"] + ([] if mode.role == "base" else ["error"])
    rows = []
    for label, its in zip(labels, found, strict=True):
        row = [label, f"{its.value:,.0f}"]
        for mode, outcome in zip(form.modes, its.outcomes, strict=True):
            row.append(f"{outcome.step_s:.1f}")
            row += [] if mode.role == "base" else [f"{outcome.step_s / published[mode.label] - 1:+.1%}"]
        rows.append(row)
    return Table("what the predictions depend on", columns, rows)


def _order(form: Calibrated, lines: Sequence[Line]) -> list[str]:
    """Whether simulated steps come in the published order."""
    steps_of = [line for line in lines[: len(form.modes)] if isinstance(line.published, float)]
    by_published = [line.label for line in sorted(steps_of, key=lambda line: float(str(line.published)))]
    by_simulated = [line.label for line in sorted(steps_of, key=lambda line: line.simulated or 0.0)]
    return ["order of the steps: as published" if by_published == by_simulated else "order of the steps: another"]
