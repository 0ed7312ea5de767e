"""How much of so many times the devices arrives as throughput: each size planned for itself, and simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from pydantic.dataclasses import dataclass

from harness.config import STRICT, ConfigError, JobConfig
from harness.config.compose import compose_job
from harness.config.fields import Count, Positive, Switch
from harness.metrics.tables import Table
from harness.planner.candidates import Candidate
from harness.planner.explore import Effort, Exploration, TrialResult
from harness.planner.judgement import Judgements, judge
from harness.planner.plan import Plan, explore_all
from harness.prediction.evidence import SHARED
from harness.prediction.priors import Draws
from harness.studies.papers.experiment import Context, PaperExperiment
from harness.studies.papers.result import Result, ResultLine, drawn_line

_IN_TURN = f"schedule={SHARED}"


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
    in_turn = [job for span in form.spans for job in jobs_of([*experiment.overrides(), _IN_TURN], span, ways[0])]
    context.progress(f"planning {len(jobs)} sizes")
    fixed = frozenset(name.partition("=")[0] for name in experiment.overrides())
    effort = Effort(samples=form.samples, trials=form.trials)
    explorations = explore_all([*jobs, *in_turn], fixed, effort, processes=context.processes)
    found = [best(exploration) for exploration in explorations[: len(jobs)]]
    pairs = [found[first : first + 2] for first in range(0, len(found), 2)]  # smaller, larger; span by span, way by way
    main = pairs[: len(form.spans)]
    context.progress("judging them beside taking turns")
    judged = [judge(Plan(two), fixed) for two in zip(explorations, explorations[len(jobs) :], strict=False)]
    name, lines = "linearity of throughput", []
    for span, pair in zip(form.spans, main, strict=True):
        line = ResultLine(name, span.label, "predicted", published[span.label], linearity(pair, span))
        lines.append(replace(line, within=form.within))
    for number, span in enumerate(form.spans):
        small, large = (_rates(one) for one in judged[2 * number : 2 * number + 2])
        if small is not None and large is not None:
            drawn = large / small / (span.devices[1] / span.devices[0])
            lines.append(drawn_line(f"{name}, in systems drawn", span.label, drawn, published=published[span.label]))
    for number, devices in enumerate(devices for span in form.spans for devices in span.devices):
        for one in judged[number].of[1:]:
            quantity = f"{one.choice.name}, times as fast as {SHARED}"
            label = f"{form.spans[number // 2].label}: {devices:,}"
            lines.append(drawn_line(quantity, label, one.speedup, verdict=one.verdict))
    tables = [_layouts(form.spans, main), _variations(form.spans, ways, pairs, published)]
    return Result(experiment, lines, tables=tables)


def _rates(judged: Judgements) -> Draws | None:
    """Samples per second in each draw, but for a factor; None where nothing was judged."""
    if judged.baseline_s is None:
        return None
    one = judged.of[-1]
    rates: Draws = one.choice.config.algorithm.trained_samples * one.speedup / judged.baseline_s
    return rates


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
