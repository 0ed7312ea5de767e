"""`make plan`: from the command line to tables, a picture and a JSON file."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job
from harness.metrics.safe_files import write_text
from harness.studies.planner.explore import Effort
from harness.studies.planner.picture import draw_plan
from harness.studies.planner.plan import Plan, make_plan
from harness.studies.planner.report import as_json, print_plan
from schedules import SCHEDULES

DEFAULTS = {
    "model": "qwen7b",
    "cluster.devices": "16",
    "algorithm.batch_groups": "512",
    "algorithm.group_size": "16",
}
"""What is planned where nothing else is said: a batch as published runs have it (verl's fully asynchronous recipe)."""

EFFORT = Effort(samples=85_000, trials=12)


def plan_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Schedules, and the settings of the job: the user's, and the defaults of what they do not say."""
    given = [argument for argument in arguments if not argument.startswith("schedule=")]
    chosen = [argument.partition("=")[2] for argument in arguments if argument.startswith("schedule=")]
    schedules = list(SCHEDULES) if not chosen or chosen[-1] == "all" else [chosen[-1]]
    said = {argument.partition("=")[0] for argument in given}
    return schedules, [f"{name}={value}" for name, value in DEFAULTS.items() if name not in said] + given


def fixed_by(settings: Sequence[str]) -> frozenset[str]:
    """Settings that the user chose: they are not searched. A split cannot be among them."""
    names = frozenset(setting.lstrip("+~").partition("=")[0] for setting in settings)
    for name in sorted(names):
        if name.startswith("schedule.split"):
            raise ConfigError(f"{name} is what a plan chooses; run your own split with `make bench`, or leave it out")
    return names


def plan_jobs(arguments: Sequence[str]) -> tuple[list[JobConfig], list[str]]:
    """The job under every schedule that is to be planned, and its settings."""
    schedules, settings = plan_settings(arguments)
    jobs = [compose_job([f"schedule={name}", *settings]) for name in schedules]
    return jobs, settings


def plan_command(arguments: Sequence[str], results: Path, console: Console) -> Path:
    """Plan, print, and write plan.json and plan.png into results/plan/<job>/, whose path is returned."""
    started = time.monotonic()
    jobs, settings = plan_jobs(arguments)
    fixed = fixed_by(settings) - DEFAULTS.keys()
    with console.status("planning") as status:
        plan = make_plan(jobs, fixed, EFFORT, told=lambda name: status.update(f"planning: done with {name}"))
    seconds = time.monotonic() - started
    print_plan(plan, settings, console)
    folder = _folder(jobs, settings, results)
    write_plan(plan, settings, seconds, folder)
    console.print(f"\nplanned in {seconds:.0f} s", style="dim", highlight=False)
    console.print(f"{folder}/", style="bold", soft_wrap=True, highlight=False, markup=False)
    console.print("  plan.json plan.png", highlight=False)
    return folder


def write_plan(plan: Plan, settings: list[str], seconds: float, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "plan.json", json.dumps(as_json(plan, settings, seconds), indent=1) + "\n")
    draw_plan(plan, folder / "plan.png")


def _folder(jobs: Sequence[JobConfig], settings: Sequence[str], results: Path) -> Path:
    job = jobs[0]
    digest = hashlib.sha256(json.dumps([[its.schedule.name for its in jobs], *settings]).encode()).hexdigest()[:6]
    return results / "plan" / f"{job.model.name}-{job.cluster.devices}-{job.device.name}-{digest}"
