"""`make plan`: the fastest split and layout of every schedule."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.steps import StepsBar
from harness.config import JobConfig
from harness.metrics.atomic_files import write_text
from harness.planner.plan import DEFAULTS, EFFORT, Plan, fixed_by, make_plan, own_difference, plan_jobs
from harness.planner.report import as_json, draw_plan, print_plan


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Search splits and layouts of every schedule, or of one, for the fastest; print them, and write plan.json and
    plan.png into results/plan/<job>/."""
    started = time.monotonic()
    jobs, settings = plan_jobs(arguments)
    fixed = fixed_by(settings) - DEFAULTS.keys()
    with StepsBar("planning", console) as steps:
        plan = make_plan(jobs, fixed, EFFORT, progress=steps.done)
    seconds = time.monotonic() - started
    print_plan(plan, settings, console)
    off = f"{own_difference(plan.best):.2g} of an iteration"
    console.print(f"\nChecked: the virtual clock itself differs by {off} over two iterations of it", highlight=False)
    folder = _folder(jobs, settings, results)
    write_plan(plan, settings, seconds, folder)
    console.print(f"\nplanned in {seconds:.0f} s", style="dim", highlight=False)
    console.print(f"{folder}/", style="bold", soft_wrap=True, highlight=False, markup=False)
    console.print("  plan.json plan.png", highlight=False)
    return 0


def write_plan(plan: Plan, settings: list[str], seconds: float, folder: Path) -> None:
    """Write plan.json and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "plan.json", json.dumps(as_json(plan, settings, seconds), indent=1) + "\n")
    draw_plan(plan, folder / "plan.png")


def _folder(jobs: Sequence[JobConfig], settings: Sequence[str], results: Path) -> Path:
    job = jobs[0]
    digest = hashlib.sha256(json.dumps([[each.schedule.name for each in jobs], *settings]).encode()).hexdigest()[:6]
    return results / "plan" / f"{job.model.name}-{job.cluster.devices}-{job.device.name}-{digest}"
