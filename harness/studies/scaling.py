"""The scaling study: every schedule planned for 32 to 1,024 devices, one job, judged beside taking turns."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from harness.config.compose import DOCS
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import markdown_table, of_schedules
from harness.planner.explore import Effort, Exploration
from harness.planner.judgement import judge
from harness.planner.plan import Plan, Progress, explore_all, origin, plan_jobs
from harness.prediction.evidence import SHARED
from harness.prediction.forecast import SURE, figures_of, interval, verdict_of
from harness.prediction.priors import Draws
from harness.report.drawing import legend_below, letters_across, lines_high, save_in_every_format
from harness.report.palette import OTHER
from harness.report.templates import rendered

PAGE = DOCS.parent / "results/reference/simulated/scaling.md"

MODELS = ("qwen7b", "qwen32b")

JOB = ("algorithm.reference=true",)  # settings of every job: reference and old log-probs are both scored
SIZES = (32, 64, 128, 256, 512, 1024)

STALENESS = "schedule.max_staleness"
"""The staleness of fully_async, as in its file: another staleness would be another schedule."""

EFFORT = Effort(samples=10**6, trials=2, parts=12)  # two whole trials, however many iterations they take


@dataclass(frozen=True)
class Point:
    """The best plan of a schedule for so many devices. Idle: a share of the time. speedup: over the best way of taking
    turns on as many devices, in each system drawn; None where that does not fit, or is this one."""

    model: str
    schedule: str
    devices: int
    samples_per_s: float
    lag_mean: float
    rollout_idle: float
    training_idle: float
    split: str
    layout: str
    speedup: Draws | None = None


@dataclass(frozen=True)
class ScalingStudy:
    """All points, by devices. groups x group_size: the batch. costs: where they come from."""

    points: Sequence[Point]
    groups: int
    group_size: int
    costs: str

    @property
    def models(self) -> list[str]:
        """Models in their order."""
        return list(dict.fromkeys(point.model for point in self.points))

    def of(self, model: str, schedule: str) -> list[Point]:
        """Points of a model under a schedule."""
        return [point for point in self.points if (point.model, point.schedule) == (model, schedule)]

    def schedules(self, model: str) -> list[str]:
        """Fastest at the largest size first."""
        last = {point.schedule: point for point in self.points if point.model == model}
        return sorted(last, key=lambda schedule: (-last[schedule].devices, -last[schedule].samples_per_s))


def write_study(progress: Progress) -> Path:
    """Plan everything, and write PAGE with its picture and table."""
    started = time.monotonic()
    study = run_study(progress)
    seconds = time.monotonic() - started
    title = f"Strong scaling, {study.groups} x {study.group_size} · simulated · costs {study.costs}"
    save_in_every_format(PAGE.parent, PAGE.stem, title, draw_scaling, as_table(study))
    write_text(PAGE, page(study, seconds))
    return PAGE


def run_study(progress: Progress) -> ScalingStudy:
    """The best plan of every schedule that fits, for every model and size."""
    jobs = [
        job
        for model in MODELS
        for size in reversed(SIZES)  # the longest first: the last to end should be short
        for job in plan_jobs([f"model={model}", f"cluster.devices={size}", *JOB])[0]
    ]
    explorations = explore_all(jobs, frozenset({STALENESS}), EFFORT, progress=progress)
    of_size: dict[tuple[str, int], list[Exploration]] = {}
    for one in explorations:
        of_size.setdefault((one.config.model.name, one.config.cluster.devices), []).append(one)
    plans = [Plan(its) for its in of_size.values()]
    speedups = {id(one.choice): one.speedup for plan in plans for one in judge(plan, {STALENESS}).of[1:]}
    points = [
        Point(
            model=choice.config.model.name,
            schedule=choice.schedule,
            devices=choice.config.cluster.devices,
            samples_per_s=choice.outcome.samples_per_s,
            lag_mean=choice.outcome.lag_mean,
            rollout_idle=choice.outcome.rollout_idle,
            training_idle=choice.outcome.training_idle,
            split=choice.candidate.describe()[0],
            layout=choice.candidate.describe()[1],
            speedup=speedups.get(id(choice)),
        )
        for plan in plans
        for choice in plan.best_of_each
    ]
    algorithm = jobs[0].algorithm
    points.sort(key=lambda point: (point.devices, point.schedule))
    return ScalingStudy(points, algorithm.batch_groups, algorithm.group_size, origin(jobs[0]))


def efficiency(points: Sequence[Point]) -> list[float]:
    """Samples/s of each against ideal linear scaling from the first, the smallest size that fits."""
    first = points[0]
    return [point.samples_per_s / first.samples_per_s * first.devices / point.devices for point in points]


def page(study: ScalingStudy, seconds: float) -> str:
    """The whole page."""
    sizes = sorted({point.devices for point in study.points})
    values = {
        "study": study,
        "sizes": sizes,
        "minutes": seconds / 60,
        "SHARED": SHARED,
        "SURE": SURE,
        "rates": _rates,
        "plans": _plans,
        "speedups": _speedups if any(point.speedup is not None for point in study.points) else None,
    }
    return rendered(__package__, "scaling.md.jinja", values)


def _speedups(study: ScalingStudy, model: str, sizes: Sequence[int]) -> str:
    """Medians, intervals and verdicts, as a plan of each size has them."""
    rows = []
    for schedule in study.schedules(model):
        drawn = {p.devices: p.speedup for p in study.of(model, schedule) if p.speedup is not None}
        if drawn:
            rows.append([schedule, *(_cell(drawn.get(size)) for size in sizes)])
    return markdown_table(["schedule", *(f"{size:,}" for size in sizes)], rows)


def _cell(speedup: Draws | None) -> str:
    if speedup is None:
        return "-"
    median, between, _ = figures_of(speedup)
    return f"{median} ({between}) {verdict_of(speedup)}"


def _rates(study: ScalingStudy, model: str, sizes: Sequence[int]) -> str:
    rows = []
    for schedule in study.schedules(model):
        points = study.of(model, schedule)
        rates = {
            p.devices: f"{p.samples_per_s:,.1f} ({e:.0%})" for p, e in zip(points, efficiency(points), strict=True)
        }
        rows.append([schedule, *(rates.get(size, "-") for size in sizes), f"{points[-1].lag_mean:.2f}"])
    return markdown_table(["samples/s (of ideal)", *(f"{size:,}" for size in sizes), "lag mean"], rows)


def _plans(study: ScalingStudy, model: str, size: int) -> str:
    points = [point for schedule in study.schedules(model) for point in study.of(model, schedule)]
    rows = [
        [p.schedule, p.split, p.layout, f"{abs(p.rollout_idle):.0%}, {abs(p.training_idle):.0%}"]
        for p in points
        if p.devices == size
    ]
    return markdown_table(("schedule", "devices", "layout", "idle"), rows)


def as_table(study: ScalingStudy) -> pd.DataFrame:
    """A row for each point: samples/s, share of ideal, and the speed-up's median and interval where it has one."""
    rows = []
    for model in study.models:
        for schedule in study.schedules(model):
            points = study.of(model, schedule)
            for point, share in zip(points, efficiency(points), strict=True):
                row = {"model": model, "schedule": schedule, "devices": point.devices}
                row |= {"samples_per_s": point.samples_per_s, "of_ideal": share, "lag": point.lag_mean}
                drawn = [] if point.speedup is None else [np.median(point.speedup), *interval(point.speedup)]
                rows.append(row | dict(zip(("median", "low", "high"), drawn, strict=False)))
    return pd.DataFrame(rows, columns=[*_COLUMNS, "lag", "median", "low", "high"])


_COLUMNS = ("model", "schedule", "devices", "samples_per_s", "of_ideal")


def draw_scaling(figure: Figure, data: pd.DataFrame) -> None:
    """Draw samples/s, share of ideal, and speed-ups with their intervals, against devices; a column per model."""
    models, schedules = data["model"].unique(), data["schedule"].unique()
    colors = of_schedules(list(schedules))
    sizes = sorted(data["devices"].unique())
    figure.set_figheight(lines_high(54))
    panels = figure.subplots(3, len(models), squeeze=False, sharex=True, sharey="row")
    for (model, of_model), (rate, share, gain) in zip(data.groupby("model", sort=False), panels.T, strict=True):
        for place, (schedule, points) in enumerate(of_model.groupby("schedule", sort=False)):
            style: Any = {"color": colors[str(schedule)], "marker": "o", "markersize": 3, "linewidth": 1.2}
            rate.plot(points["devices"], points["samples_per_s"], label=schedule, **style)
            share.plot(points["devices"], points["of_ideal"], **style)
            at = points["devices"] * 1.07 ** (place - len(schedules) / 2)  # beside each other
            ends = [points["median"] - points["low"], points["high"] - points["median"]]
            gain.errorbar(at, points["median"], ends, fmt="o", color=style["color"], markersize=3, elinewidth=1)
        rate.set(title=str(model), xscale="log", yscale="log")
        rate.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        rate.yaxis.set_minor_formatter(NullFormatter())
        share.set(ylim=(0, 1.1))
        gain.set(xlabel="devices")
        for axes in (share, gain):
            axes.axhline(1.0, color=OTHER, linewidth=1, linestyle="--", zorder=0)
        shown = sizes[:: 1 if letters_across(figure) > 70 else 2]
        share.set_xticks(shown, [f"{size:,}" for size in shown])
        share.minorticks_off()
    names = ("samples/s (simulated)", "of ideal linear scaling", f"times as fast as {SHARED}, median and {SURE:.0%}")
    for axes, name in zip(panels[:, 0], names, strict=True):
        axes.set_ylabel(fill(name, 26))
    legend_below(figure, panels[0, 0].get_legend_handles_labels()[0])
