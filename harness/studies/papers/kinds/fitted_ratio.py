"""One unknown, the ratio of rollout to training, fitted to one published speed-up; the other speed-ups predicted.

In units of the time that a batch takes to generate, on engines that the roofline describes: training takes 1 / ratio of
it, reference log-probs `reference_share` of that. Each pool of devices that work together is one device of the
simulation, each rollout engine another (as in `make predict`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from functools import partial

from pydantic.dataclasses import dataclass

from harness.config import STRICT, JobConfig
from harness.config.compose import compose_job
from harness.config.fields import Count, Positive
from harness.runtime.parallel import parallel_map
from harness.studies.papers.experiment import PaperExperiment
from harness.studies.papers.modes import Mode, batches_of, of_role, steps
from harness.studies.papers.result import Line, Result, Table
from harness.studies.papers.surroundings import Surroundings
from harness.studies.predictions.fit import drawn, engine_cost
from harness.studies.predictions.pool import by_token_alone, one_device_each

WITHIN = 0.10
"""Of a predicted speed-up."""

_NEAR = 0.003  # of the figure that is fitted to
_TRIES = 12
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, config=STRICT)
class Variation:
    """Other settings of the job, or of the kind, to see what the prediction depends on."""

    label: str
    job: list[str] = field(default_factory=list)
    engines: Count | None = None
    reference_share: Positive | None = None
    modes: dict[str, list[str]] = field(default_factory=dict)
    """Jobs of modes, by their labels."""


@dataclass(frozen=True, config=STRICT)
class FittedRatio:
    """table: its rows have this in the column `experiment`; engines: of rollout; least, most: ratios to look among."""

    table: str
    engines: Count
    reference_share: Positive
    least: Positive
    most: Positive
    modes: list[Mode]
    variations: list[Variation] = field(default_factory=list)


@plain_dataclass(frozen=True)
class Setup:
    """What the fit may know: no published figure is in it."""

    job: tuple[str, ...]
    engines: int
    reference_share: float
    least: float
    most: float
    modes: tuple[Mode, ...]


@plain_dataclass(frozen=True)
class Fitted:
    """speedups: over the mode of role `base`, by label. ratio: None where no ratio gives the fitted speed-up, which is
    then the nearest that there is."""

    ratio: float | None
    speedups: Mapping[str, float]


def run(experiment: PaperExperiment, around: Surroundings) -> Result:
    """Fit and predict; then the same under each variation."""
    form = experiment.read(FittedRatio)
    rows = experiment.published(experiment=form.table)
    published = {row["configuration"]: float(row["relative_throughput"]) for row in rows}
    experiment.check_published([mode.label for mode in form.modes], published)
    fitted_to = published[of_role(form.modes, "fitted").label]
    setups = [setup_of(experiment.overrides(), form)]
    setups += [setup_of(experiment.overrides(), form, its) for its in form.variations]
    around.told(f"fitting and predicting, {len(setups)} times")
    call = partial(fit_and_predict, fitted_to)
    found = parallel_map(call, setups, processes=around.processes, timeout_s=_TIMEOUT_S, what="ratios to be fitted")
    main = found[0]
    lines = [
        Line(
            "throughput, relative to the first",
            mode.label,
            mode.role,
            published[mode.label],
            main.speedups[mode.label],
            within=WITHIN if mode.role == "predicted" else None,
        )
        for mode in form.modes
    ]
    told = [form.variations[number - 1].label for number in range(1, len(setups))]
    table = variations_table(["as above", *told], found, form.modes, published)
    ratio = "no ratio gives it" if main.ratio is None else f"rollout : training = {main.ratio:.2f} : 1"
    return Result(experiment, lines, [f"fitted to {fitted_to:g}: {ratio}"], [table])


def setup_of(job: Sequence[str], form: FittedRatio, its: Variation | None = None) -> Setup:
    """What is fitted with, in the experiment or a variation of it."""
    its = its or Variation("")
    modes = [replace(mode, job=its.modes.get(mode.label, mode.job)) for mode in form.modes]
    share = its.reference_share or form.reference_share
    return Setup((*job, *its.job), its.engines or form.engines, share, form.least, form.most, tuple(modes))


def fit_and_predict(fitted_to: float, setup: Setup) -> Fitted:
    """The ratio for which the fitted mode is `fitted_to` times as fast as the base, and how fast all modes are then.

    From `least` on, the longer rollout takes against the two others, the less there is to overlap: the speed-up falls,
    and is fitted by false position (the Illinois variant), its logarithm over the logarithm of the ratio.
    """
    simulation = Simulation(setup)
    mode = of_role(setup.modes, "fitted")

    def off(ratio: float) -> float:
        return math.log(simulation.speedup(mode, ratio) / fitted_to)

    low, high = setup.least, setup.most
    above, below = off(low), off(high)
    ratio, found = min(((low, above), (high, below)), key=lambda its: abs(its[1]))
    if above < 0 or below > 0:
        return Fitted(None, simulation.speedups(ratio))
    for _ in range(_TRIES):
        if abs(found) <= _NEAR:
            break
        ratio = math.exp(math.log(low) + above / (above - below) * math.log(high / low))
        found = off(ratio)
        if found > 0:
            low, above, below = ratio, found, below / 2
        else:
            high, below, above = ratio, found, above / 2
    return Fitted(ratio, simulation.speedups(ratio))


class Simulation:
    """How much faster than the base a mode is, at a ratio. The base does one task at a time, so that its step is what
    its tasks take: only its rollout and its weight transfer are simulated."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._base = of_role(setup.modes, "base")
        self._base_s = steps(_job(setup, self._base, train_s=0.0)).seconds

    def speedup(self, mode: Mode, ratio: float) -> float:
        """Of a mode over the base."""
        train_s = self._base_s / ratio
        if mode == self._base:
            return 1.0
        sequential_s = self._base_s + (1 + self._setup.reference_share) * train_s
        return sequential_s / steps(_job(self._setup, mode, train_s)).seconds

    def speedups(self, ratio: float) -> dict[str, float]:
        """Of all modes, by label."""
        return {mode.label: self.speedup(mode, ratio) for mode in self._setup.modes}


def _job(setup: Setup, mode: Mode, train_s: float) -> JobConfig:
    """A mode's job, whose training takes so long for a batch."""
    config = compose_job(["backend=virtual", *setup.job, *mode.job])
    cost = engine_cost(config, colocated=False)
    samples = config.algorithm.batch_samples
    batches = batches_of(config)
    tokens = drawn(cost.lengths, config, batches).sum() / batches + samples * cost.prompt_tokens
    return replace(
        one_device_each(config, {"rollout": setup.engines, "actor": 1, "reference": 1}),
        algorithm=replace(config.algorithm, reference=True, recompute_log_probs=False),
        cost=by_token_alone(cost, train_s / tokens, setup.reference_share * train_s / tokens),
    )


def variations_table(
    labels: Sequence[str], found: Sequence[Fitted], modes: Sequence[Mode], published: Mapping[str, float]
) -> Table:
    """The fit and the predictions under each variation, with the errors of what is predicted."""
    predicted = [mode for mode in modes if mode.role == "predicted"]
    fitted = of_role(modes, "fitted")
    columns = ["settings", "rollout : training", f"{fitted.label} (fitted)"]
    for mode in predicted:
        columns += [mode.label, "error"]
    rows = []
    for label, its in zip(labels, found, strict=True):
        row = [label, "not reached" if its.ratio is None else f"{its.ratio:.2f}", f"{its.speedups[fitted.label]:.2f}"]
        for mode in predicted:
            error = its.speedups[mode.label] / published[mode.label] - 1
            row += [f"{its.speedups[mode.label]:.2f}", "" if its.ratio is None else f"{error:+.1%}"]
        rows.append(row)
    return Table("what the prediction depends on", columns, rows)
