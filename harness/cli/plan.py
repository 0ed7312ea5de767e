"""`make plan`: the fastest split and layout of every schedule."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import every_value
from harness.cli.steps import StepsBar
from harness.config import JobConfig
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import say
from harness.planner.judgement import DRAWS, Judgements, judge
from harness.planner.plan import DEFAULTS, EFFORT, Plan, fixed_by, make_plan, own_difference, plan_jobs
from harness.planner.report import as_json, draw_plan, print_plan
from harness.prediction.scores import how_often


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Search splits and layouts of every schedule, or of one, for the fastest; print them, and write plan.json and
    plan.png into results/plan/<job>/. log: of a run, whose job is planned, at
    the costs of a plan."""
    started = time.monotonic()
    logs, arguments = every_value("log", arguments)
    evidence = None
    if logs:
        from harness.prediction.logs.answer import in_turn
        from harness.prediction.logs.read import read_log

        kept = [one for one in arguments if one.partition("=")[0] == "schedule"]
        rest = [one for one in arguments if one not in kept]
        read = read_log([Path(log) for log in logs], rest)
        told = (
            f"its step took {read.row.step_s:.3g} s; it narrows intervals, while trials stand on the data sheet's costs"
        )
        say(console, "\n".join([f"{read.evidence.source}: {read.row}", *read.notes, told]))
        arguments = [*kept, *read.settings]
        evidence = replace(read.evidence, rows=(in_turn(read.row),), settings=read.arguments)
    jobs, settings = plan_jobs(arguments)
    fixed = fixed_by(settings) - DEFAULTS.keys()
    with StepsBar("planning", console) as steps:
        plan = make_plan(jobs, fixed, EFFORT, processes=1, progress=steps.done)
    with console.status(f"judging in {DRAWS} systems"):
        judged = judge(plan, fixed, evidence)
    seconds = time.monotonic() - started
    print_plan(plan, settings, console, judged)
    off = f"{own_difference(plan.best):.2g} of an iteration"
    say(console, f"\nChecked: the virtual clock itself differs by {off} over two iterations of a part of it")
    say(console, f"Predictions are scored: {how_often()} (docs/predictions.md)")
    folder = _folder(jobs, settings, results)
    write_plan(plan, settings, seconds, folder, judged)
    say(console, f"\nplanned in {seconds:.0f} s", "dim")
    say(console, f"{folder}/", "bold")
    say(console, "  plan.json plan.png")
    return 0


def write_plan(plan: Plan, settings: list[str], seconds: float, folder: Path, judged: Judgements) -> None:
    """Write plan.json and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "plan.json", json.dumps(as_json(plan, settings, seconds, judged), indent=1) + "\n")
    draw_plan(plan, folder / "plan.png", judged)


def _folder(jobs: Sequence[JobConfig], settings: Sequence[str], results: Path) -> Path:
    job = jobs[0]
    digest = hashlib.sha256(json.dumps([[each.schedule.name for each in jobs], *settings]).encode()).hexdigest()[:6]
    return results / "plan" / f"{job.model.name}-{job.cluster.devices}-{job.device.name}-{digest}"
