"""The scaling study: every schedule planned for 32 to 1,024 devices, the same job each time."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

from harness.metrics.atomic_files import write_text
from harness.studies.planner.explore import Effort
from harness.studies.planner.jobs import plan_jobs
from harness.studies.planner.origin import origin
from harness.studies.planner.plan import Plan, explore_all
from harness.studies.planner.scaling_page import Point, Study, draw_scaling, page

MODELS = ("qwen7b", "qwen32b")
SIZES = (32, 64, 128, 256, 512, 1024)
STALENESS = "schedule.max_staleness"
"""Of fully_async it is as in its file: the study compares schedules, and another staleness is another schedule."""

EFFORT = Effort(samples=10**6, trials=2)  # two trials of each schedule, however many iterations they take
DOCS = Path(__file__).resolve().parents[3] / "docs"


def write_study(results: Path, told: Callable[[str], None]) -> Path:
    """Plan everything, and write docs/scaling.md with its picture, and results/scaling.json."""
    started = time.monotonic()
    study = run_study(told)
    seconds = time.monotonic() - started
    results.mkdir(parents=True, exist_ok=True)
    told_json = {"simulated": True, "planning_s": seconds, **dataclasses.asdict(study)}
    write_text(results / "scaling.json", json.dumps(told_json, indent=1) + "\n")
    draw_scaling(study, DOCS / "images" / "scaling.png")
    write_text(DOCS / "scaling.md", page(study, seconds))
    return DOCS / "scaling.md"


def run_study(told: Callable[[str], None]) -> Study:
    """The best plan of every schedule that fits, for every model and size."""
    jobs = [
        job
        for model in MODELS
        for size in reversed(SIZES)  # the longest first: the last to end should be short
        for job in plan_jobs([f"model={model}", f"cluster.devices={size}"])[0]
    ]
    explorations = explore_all(jobs, frozenset({STALENESS}), EFFORT, told=told)
    choices = [choice for its in explorations for choice in Plan([its]).best_of_each]
    points = [
        Point(
            model=choice.config.model.name,
            schedule=choice.schedule,
            devices=choice.config.cluster.devices,
            samples_per_s=choice.outcome.samples_per_s,
            lag_mean=choice.outcome.lag_mean,
            rollout_idle=choice.outcome.rollout_idle,
            training_idle=choice.outcome.training_idle,
            split=choice.candidate.told()[0],
            layout=choice.candidate.told()[1],
        )
        for choice in choices
    ]
    algorithm = jobs[0].algorithm
    points.sort(key=lambda point: (point.devices, point.schedule))
    return Study(points, algorithm.batch_groups, algorithm.group_size, origin(jobs[0]))
