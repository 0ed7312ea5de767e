"""docs/scaling.md and its picture: points of the scaling study, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from harness.report.plots import save_figure


@dataclass(frozen=True)
class Point:
    """The best plan of a schedule for so many devices. Idle: a share of the time."""

    model: str
    schedule: str
    devices: int
    samples_per_s: float
    lag_mean: float
    rollout_idle: float
    training_idle: float
    split: str
    layout: str


@dataclass(frozen=True)
class Study:
    """All points, by devices. groups x group_size: the batch. costs: where they come from."""

    points: Sequence[Point]
    groups: int
    group_size: int
    costs: str

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(point.model for point in self.points))

    def of(self, model: str, schedule: str) -> list[Point]:
        return [point for point in self.points if (point.model, point.schedule) == (model, schedule)]

    def schedules(self, model: str) -> list[str]:
        """Fastest at the largest size first."""
        last = {point.schedule: point for point in self.points if point.model == model}
        return sorted(last, key=lambda schedule: (-last[schedule].devices, -last[schedule].samples_per_s))


def efficiency(points: Sequence[Point]) -> list[float]:
    """Samples/s of each against ideal linear scaling from the first, the smallest size that fits."""
    first = points[0]
    return [point.samples_per_s / first.samples_per_s * first.devices / point.devices for point in points]


def page(study: Study, seconds: float) -> str:
    """The whole page."""
    sizes = sorted({point.devices for point in study.points})
    parts = [
        "# Scaling, planned and simulated",
        f"Written by `make scaling` in {seconds / 60:.0f} minutes; nothing here was measured. Every point is the best "
        f"plan of a schedule ([planner.md](planner.md)), run by the schedule's own file on the virtual clock; costs: "
        f"{study.costs}.",
        f"Strong scaling: the batch is {study.groups} prompts x {study.group_size} responses whatever the number of "
        "devices, since it is part of the algorithm: a larger one learns something else, and samples/s of two batches "
        "cannot be compared. So the end of the curves is the batch's: with more devices each has fewer responses, "
        "decoding is bound by reading weights, and an iteration never takes less than its longest response "
        "(divided by the iterations that rollout may be ahead). Each schedule has two trials at each size, those that "
        "look likeliest: differences of a few per cent are the search's.",
        "`fully_async` has the staleness of its file (2). *Of ideal*: samples/s against linear scaling from the "
        "smallest size that fits. *Idle*: rollout and training devices. A dash: does not fit.",
        "![Scaling of all schedules](images/scaling.png)",
    ]
    for model in study.models:
        parts += [f"## {model}", _rates(study, model, sizes), _plans(study, model, max(sizes))]
    return "\n\n".join(parts) + "\n"


def _rates(study: Study, model: str, sizes: Sequence[int]) -> str:
    head = "| samples/s (of ideal) | " + " | ".join(f"{size:,}" for size in sizes) + " | lag mean |"
    lines = [head, "|---|" + "---:|" * (len(sizes) + 1)]
    for schedule in study.schedules(model):
        points = study.of(model, schedule)
        told = {p.devices: f"{p.samples_per_s:,.1f} ({e:.0%})" for p, e in zip(points, efficiency(points), strict=True)}
        cells = " | ".join(told.get(size, "-") for size in sizes)
        lines.append(f"| {schedule} | {cells} | {points[-1].lag_mean:.2f} |")
    return "\n".join(lines)


def _plans(study: Study, model: str, size: int) -> str:
    lines = [f"The plans at {size:,} devices:", "", "| schedule | devices | layout | idle |", "|---|---|---|---:|"]
    for schedule in study.schedules(model):
        for point in study.of(model, schedule):
            if point.devices == size:
                idle = f"{abs(point.rollout_idle):.0%}, {abs(point.training_idle):.0%}"
                lines.append(f"| {schedule} | {point.split} | {point.layout} | {idle} |")
    return "\n".join(lines)


def draw_scaling(study: Study, path: Path) -> Path:
    """PNG at `path`: samples/s and share of ideal against devices, a column per model."""
    title = f"Strong scaling, {study.groups} x {study.group_size} · simulated · costs {study.costs}"
    return save_figure(path, title, lambda figure: _draw(figure, study))


def _draw(figure: Figure, study: Study) -> None:
    figure.set_size_inches(6.2 * len(study.models), 8.2)
    panels = figure.subplots(2, len(study.models), squeeze=False, sharex=True)
    names = sorted({point.schedule for point in study.points})
    colors = dict(zip(names, sns.color_palette("colorblind", len(names)), strict=True))
    sizes = sorted({point.devices for point in study.points})
    for column, model in enumerate(study.models):
        rate, share = panels[0][column], panels[1][column]
        for schedule in study.schedules(model):
            points = study.of(model, schedule)
            x = [point.devices for point in points]
            style = {"color": colors[schedule], "marker": "o", "markersize": 4, "linewidth": 1.6}
            rate.plot(x, [point.samples_per_s for point in points], label=schedule, **style)
            share.plot(x, efficiency(points), **style)
        rate.set(title=model, xscale="log", yscale="log", ylabel="samples/s (simulated)")
        rate.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        rate.yaxis.set_minor_formatter(NullFormatter())
        share.set(ylim=(0, 1.1), xlabel="devices", ylabel="of ideal linear scaling")
        share.axhline(1.0, color="0.4", linewidth=1, linestyle="--")
        share.set_xticks(sizes, [f"{size:,}" for size in sizes])
        share.minorticks_off()
        rate.legend(fontsize="small", loc="upper left")
