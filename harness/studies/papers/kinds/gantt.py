"""The same job under several ways of working, as Gantt charts one above the other; and what of the time is idle."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from pydantic.dataclasses import dataclass

from harness.config import STRICT
from harness.config.fields import Count
from harness.metrics.timeline import Timeline
from harness.report.gantt import draw_lanes, legend
from harness.studies.papers.experiment import PaperExperiment
from harness.studies.papers.modes import Mode, job_of, steps
from harness.studies.papers.result import Line, Result
from harness.studies.papers.surroundings import Surroundings


@dataclass(frozen=True, config=STRICT)
class Gantt:
    """iterations: that are shown."""

    modes: list[Mode]
    iterations: Count


def run(experiment: PaperExperiment, around: Surroundings) -> Result:
    """Simulate every way of working, and draw them on axes of one length."""
    form = experiment.read(Gantt)
    around.told(f"simulating {len(form.modes)} ways of working")
    found = [steps(job_of(mode, experiment.overrides())) for mode in form.modes]
    timelines = [its.recorder.timeline for its in found]
    lines = []
    for mode, its in zip(form.modes, found, strict=True):
        lines.append(Line("seconds per step", mode.label, mode.role, None, its.seconds))
    for role in ("rollout", "actor"):
        for mode, its in zip(form.modes, found, strict=True):
            idle = 100 * its.recorder.timeline.idle(role, its.window)
            lines.append(Line(f"{role} idle, %", mode.label, mode.role, None, idle))
    labels = [mode.label for mode in form.modes]
    return Result(experiment, lines, draw=lambda figure: draw(figure, labels, timelines, form.iterations))


def draw(figure: Figure, labels: Sequence[str], timelines: Sequence[Timeline], iterations: int) -> None:
    """A panel each, from the start of the run, all with the time axis of the slowest."""
    lanes = [len(timeline.placement) for timeline in timelines]
    figure.set_size_inches(13, 1.2 + sum(0.9 + 0.3 * count for count in lanes))
    panels = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=lanes)[:, 0]
    windows = [timeline.window(sorted(timeline.iteration_ends)[iterations - 1])[1] for timeline in timelines]
    for axes, label, timeline in zip(panels, labels, timelines, strict=True):
        shown = sorted(timeline.iteration_ends)[:iterations]
        draw_lanes(axes, timeline, shown, (0.0, max(windows)))
        axes.set_title(label, loc="left", fontsize="medium", pad=16)
    legend(figure, timelines)
