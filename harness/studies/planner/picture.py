"""A plan as a picture: throughput against lag, and every schedule's best as a bar."""

from __future__ import annotations

from pathlib import Path

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report.plots import save_figure
from harness.studies.planner.origin import origin
from harness.studies.planner.plan import Plan


def draw_plan(plan: Plan, path: Path) -> Path:
    """PNG at `path`. Left: all that was simulated, and the front; right: the best of every schedule."""
    job = plan.best.config
    title = f"{job.model.name} on {job.cluster.devices} devices · simulated · costs {origin(job)}"
    return save_figure(path, title, lambda figure: _draw(figure, plan))


def _draw(figure: Figure, plan: Plan) -> None:
    figure.set_size_inches(12.5, 1.8 + 0.45 * max(6, len(plan.best_of_each)))
    points, bars = figure.subplots(1, 2, width_ratios=(1.25, 1))
    names = sorted({choice.schedule for choice in plan.choices})
    colors = dict(zip(names, sns.color_palette("colorblind", len(names)), strict=True))
    _draw_front(points, plan, colors)
    _draw_bars(bars, plan, colors)


def _draw_front(axes: Axes, plan: Plan, colors: dict[str, tuple[float, float, float]]) -> None:
    for schedule, color in colors.items():
        its = [choice.outcome for choice in plan.choices if choice.schedule == schedule]
        x, y = [o.lag_mean for o in its], [o.samples_per_s for o in its]
        axes.scatter(x, y, s=26, color=color, alpha=0.75, label=schedule, linewidths=0)
    front = [(choice.outcome.lag_mean, choice.outcome.samples_per_s) for choice in plan.front]
    steps = [*front, (max(choice.outcome.lag_mean for choice in plan.choices), front[-1][1])]
    axes.step(*zip(*steps, strict=True), where="post", color="0.35", linewidth=1.2, zorder=0, label="not beaten")
    axes.set(xlabel="mean lag (iterations)", ylabel="samples/s (simulated)", ylim=(0, None), title="all that was tried")
    axes.legend(fontsize="small", loc="lower right")


def _draw_bars(axes: Axes, plan: Plan, colors: dict[str, tuple[float, float, float]]) -> None:
    best = plan.best_of_each
    rates = [choice.outcome.samples_per_s for choice in best]
    axes.barh([choice.name for choice in best], rates, color=[colors[choice.schedule] for choice in best], height=0.7)
    for row, choice in enumerate(best):
        its = choice.outcome
        text = f"{its.samples_per_s:,.1f}  lag {its.lag_mean:.2f}  {choice.candidate.told()[0]}"
        axes.annotate(text, (its.samples_per_s, row), (5, 0), textcoords="offset points", va="center", fontsize="small")
    axes.invert_yaxis()
    axes.set(
        xlabel="samples/s (simulated)",
        title="the best of every schedule: samples/s, mean lag, devices",
        xlim=(0, 1.55 * max(rates)),
    )
    axes.grid(axis="y", visible=False)
