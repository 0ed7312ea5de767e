"""A plan as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.config.checks.job import device_roles
from harness.config.compose import plain
from harness.studies.planner.command import bench_command, layout
from harness.studies.planner.origin import origin
from harness.studies.planner.plan import Choice, Plan
from harness.studies.planner.reasons import why_slower


def print_plan(plan: Plan, settings: list[str], console: Console) -> None:
    """The best of every schedule, what none beats, why the runner-up lost, and how to run the best."""
    job = plan.best.config
    title = f"SIMULATED plan: {job.model.name} on {job.cluster.devices} devices, costs {origin(job)}"
    console.print(title, style="bold yellow", highlight=False, soft_wrap=True)
    algorithm = job.algorithm
    console.print(
        f"{algorithm.batch_groups} prompts x {algorithm.group_size} responses an iteration; lags in iterations; splits "
        "in devices; every figure is of the schedule's own file on the virtual clock",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_schedules(plan))
    console.print(_layouts(plan))
    console.print(_front(plan))
    if plan.runner_up is not None:
        console.print(f"Runner-up: {why_slower(plan.runner_up, plan.best)}", highlight=False, soft_wrap=True)
    for line in searched(plan):
        console.print(line, style="dim", highlight=False, soft_wrap=True)
    console.print("\nRun the best one:", style="bold")
    console.print(f"  {bench_command(plan.best, settings)}", highlight=False, soft_wrap=True, markup=False)


def searched(plan: Plan) -> list[str]:
    """What was looked at, and how sure the result is."""
    lines = []
    for its in plan.explorations:
        if its.found is None:
            lines.append(f"{its.name}: none of {its.candidates} candidates fits memory")
            continue
        room = f"not proved: bounds leave room for {its.found.gap:.0%} less time"
        sure = "the best of the grid" if its.found.left is None else room
        lines.append(
            f"{its.name}: {its.candidates:,} candidates, {its.unfit:,} do not fit memory, {its.found.pruned:,} cannot "
            f"be better by their bound, {len(its.found.tried)} simulated: {sure}"
        )
    return lines


def as_json(plan: Plan, settings: list[str], seconds: float) -> dict[str, Any]:
    """Everything that was found. seconds: that planning took."""
    return {
        "simulated": True,
        "costs": origin(plan.best.config),
        "settings": settings,
        "planning_s": seconds,
        "best": _entry(plan.best),
        "command": bench_command(plan.best, settings),
        "best_of_each": [_entry(choice) | {"why": why_slower(choice, plan.best)} for choice in plan.best_of_each],
        "front": [_entry(choice) for choice in plan.front],
        "tried": [_entry(choice) for choice in plan.choices],
        "explorations": [
            {
                "name": its.name,
                "candidates": its.candidates,
                "unfit": its.unfit,
                "pruned": its.found.pruned if its.found else 0,
                "gap": its.found.gap if its.found else None,
            }
            for its in plan.explorations
        ],
        "job": plain(plan.best.candidate.apply(plan.best.config, device_roles(plan.best.config))),
    }


def _entry(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.name,
        "schedule": choice.schedule,
        "options": choice.config.schedule.options,
        "settings": layout(choice),
        **dataclasses.asdict(choice.outcome),
    }


def _schedules(plan: Plan) -> Table:
    columns = (
        "samples/s",
        "tokens/s\n/device",
        "lag\nmean",
        "lag\nworst",
        "idle\nrollout",
        "idle\ntraining",
        "of\nbound",
    )
    table = _table("The best of every schedule (simulated)", columns)
    for choice in plan.best_of_each:
        its = choice.outcome
        table.add_row(
            choice.name,
            f"{its.samples_per_s:,.1f}",
            f"{its.tokens_per_s_per_device:,.0f}",
            f"{its.lag_mean:.2f}",
            f"{its.lag_worst:.0f}",
            f"{abs(its.rollout_idle):.0%}",
            f"{abs(its.training_idle):.0%}",
            f"{its.fraction_of_bound:.2f}",
        )
    return table


def _layouts(plan: Plan) -> Table:
    table = _table("How they use the devices", ())
    table.add_column("rollout + actor", no_wrap=True)
    table.add_column("layout")
    for choice in plan.best_of_each:
        split, layout_ = choice.candidate.told()
        table.add_row(choice.name, split, f"{layout_}, micro-batch {choice.candidate.micro_groups}")
    return table


def _front(plan: Plan) -> Table:
    table = _table(
        "Throughput against mean lag: what nothing beats (simulated)", ("lag\nmean", "samples/s", "of the fastest")
    )
    best = plan.choices[0].outcome.samples_per_s
    for choice in plan.front:
        rate = choice.outcome.samples_per_s
        table.add_row(choice.name, f"{choice.outcome.lag_mean:.2f}", f"{rate:,.1f}", f"{rate / best:.1%}")
    return table


def _table(title: str, numbers: tuple[str, ...]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
