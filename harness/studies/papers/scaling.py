"""How much of so many times the devices arrives as throughput: each size planned for itself, and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from pydantic.dataclasses import dataclass

from harness.config import STRICT, ConfigError, JobConfig
from harness.config.compose import compose_job
from harness.config.fields import Count, Positive, Switch
from harness.planner.candidates import Candidate
from harness.planner.explore import Effort, Exploration, TrialResult
from harness.planner.plan import explore_all
from harness.studies.papers.experiment import Context, PaperExperiment
from harness.studies.papers.result import Result, ResultLine, Table


@dataclass(frozen=True, config=STRICT)
class ScalingStep:
    """A step from one size to another. label: of the published row; job: its own settings."""

    label: str
    job: list[str]
    devices: tuple[Count, Count]


@dataclass(frozen=True, config=STRICT)
class ScalingVariation:
    """Other settings, to see what the figures depend on. grows: the batch grows with the devices."""

    label: str
    job: list[str] = field(default_factory=list)
    grows: Switch = False


@dataclass(frozen=True, config=STRICT)
class Scaling:
    """Settings of scaling experiments. table: its rows have this in the column `experiment`; fixed: settings that are
    not planned; samples, trials: what planning one size may cost."""

    table: str
    spans: list[ScalingStep]
    within: Positive
    samples: Count
    trials: Count
    variations: list[ScalingVariation] = field(default_factory=list)


def run_scaling(experiment: PaperExperiment, context: Context) -> Result:
    """Plan and simulate every size, under the settings and under each variation."""
    form = experiment.read(Scaling)
    published = {
        f"{row['model']}, {row['npus']}": float(row["relative_throughput"])
        for row in experiment.published(experiment=form.table)
    }
    experiment.check_published([span.label for span in form.spans], published)
    ways = [ScalingVariation("as above"), *form.variations]
    jobs = [job for way in ways for span in form.spans for job in jobs_of(experiment.overrides(), span, way)]
    context.progress(f"planning {len(jobs)} sizes")
    fixed = frozenset(name.partition("=")[0] for name in experiment.overrides())
    effort = Effort(samples=form.samples, trials=form.trials)
    found = [best(exploration) for exploration in explore_all(jobs, fixed, effort, processes=context.processes)]
    pairs = [found[first : first + 2] for first in range(0, len(found), 2)]  # smaller, larger; span by span, way by way
    main = pairs[: len(form.spans)]
    lines = [
        ResultLine(
            "linearity of throughput",
            span.label,
            "predicted",
            published[span.label],
            linearity(pair, span),
            None,
            form.within,
        )
        for span, pair in zip(form.spans, main, strict=True)
    ]
    tables = [_layouts(form.spans, main), _variations(form.spans, ways, pairs, published)]
    return Result(experiment, lines, tables=tables)


def jobs_of(job: Sequence[str], span: ScalingStep, way: ScalingVariation) -> list[JobConfig]:
    """The job on the smaller and on the larger number of devices."""
    jobs = []
    for devices in span.devices:
        config = compose_job([*job, *span.job, *way.job, f"cluster.devices={devices}"])
        groups = config.algorithm.batch_groups
        if way.grows:
            groups = groups * devices // span.devices[0]
        jobs.append(
            compose_job([*job, *span.job, *way.job, f"cluster.devices={devices}", f"algorithm.batch_groups={groups}"])
        )
    return jobs


Tried = tuple[Candidate, TrialResult]


def best(exploration: Exploration) -> Tried:
    """The fastest that was simulated. Raises ConfigError where nothing fits."""
    if exploration.found is None:
        config = exploration.config
        raise ConfigError(
            f"model={config.model.name} fits no split of {config.cluster.devices} devices of "
            f"device={config.device.name}; name larger sizes, or another device"
        )
    return exploration.found.tried[0]


def linearity(pair: Sequence[Tried], span: ScalingStep) -> float:
    """Times the throughput over times the devices."""
    small, large = (outcome.samples_per_s for _, outcome in pair)
    return large / small / (span.devices[1] / span.devices[0])


def _layouts(spans: Sequence[ScalingStep], pairs: Sequence[Sequence[Tried]]) -> Table:
    columns = ["row", "devices", "samples/s", "split", "layout", "rollout idle", "training idle"]
    rows = []
    for span, pair in zip(spans, pairs, strict=True):
        for devices, (candidate, trial) in zip(span.devices, pair, strict=True):
            idle = (f"{trial.rollout_idle:.0%}", f"{max(0.0, trial.training_idle):.0%}")
            rows.append([span.label, f"{devices:,}", f"{trial.samples_per_s:.1f}", *candidate.describe(), *idle])
    return Table("the fastest of each size, simulated", columns, rows)


def _variations(
    spans: Sequence[ScalingStep],
    ways: Sequence[ScalingVariation],
    pairs: Sequence[Sequence[Tried]],
    published: Mapping[str, float],
) -> Table:
    columns = ["settings", *(part for span in spans for part in (span.label, "error"))]
    rows = []
    for number, way in enumerate(ways):
        row = [way.label]
        for span, pair in zip(spans, pairs[number * len(spans) :], strict=False):
            value = linearity(pair, span)
            row += [f"{value:.2f}", f"{value / published[span.label] - 1:+.1%}"]
        rows.append(row)
    return Table("what the linearity depends on", columns, rows)
