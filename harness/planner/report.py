"""A plan as tables and a picture for people, and as JSON for programs; and why one choice is slower than another."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from harness.checks.layout import device_roles
from harness.config.compose import plain
from harness.metrics.formatting import of_schedules, percent, say
from harness.metrics.tables import Table
from harness.planner.judgement import DRAWS, Judgement, Judgements
from harness.planner.plan import WORTH, Choice, Plan, bench_command, devices_and_batch, layout, origin, rate, why_none
from harness.prediction.evidence import SHARED
from harness.prediction.forecast import SURE, TIE, Verdict, figures_of, interval, p_faster, verdict_of, words_of
from harness.report.drawing import save_figure

_WORTH_SAYING = 0.01  # of an iteration
_TAIL = 0.4  # of an iteration: a response that takes longer is what pools wait for


def print_plan(plan: Plan, settings: list[str], console: Console, judged: Judgements) -> None:
    """The verdict, the best of every schedule and how sure, what none beats, why the runner-up lost, and a command."""
    job = plan.best.config
    devices, batch = devices_and_batch(job)
    title = f"SIMULATED plan: {job.model.name} on {devices}, costs {origin(job)}"
    say(console, title, "bold yellow")
    say(
        console,
        f"{batch} an iteration, as bench and compare have it only where settings say so; lags in iterations; splits in "
        "devices; every figure is of the schedule's own file, driven by the event model (docs/planner.md)",
    )
    say(console, verdict(plan, judged), "bold")
    console.print(_schedules(plan))
    if judged.why_none:
        say(console, f"Not judged, how sure that is: {judged.why_none}")
    else:
        console.print(_judgements(plan, judged))
        say(
            console,
            f"{DRAWS} systems drawn from experiments/priors.yaml, {judged.stands_on}. In each the same choices run, "
            "those that are best at the plan's own costs: another system may have a better split",
            "dim",
        )
    console.print(_layouts(plan))
    console.print(_front(plan))
    if plan.runner_up is not None:
        say(console, f"Runner-up: {why_slower(plan.runner_up, plan.best)}")
    for line in searched(plan):
        say(console, line, "dim")
    console.print("\nRun the best one:", style="bold")
    say(console, f"  {bench_command(plan.best, settings)}")


def verdict(plan: Plan, judged: Judgements) -> str:
    """Say which choice is fastest, which others tie with it or cannot be told from it, which of them is proposed, and
    whether that is faster than taking turns on all devices."""
    fastest = plan.choices[0]
    devices, batch = devices_and_batch(fastest.config)
    text = f"Simulated: on {devices}, with {batch}, {fastest.name} trains most samples per second"
    told: dict[Verdict, str] = {
        "tie": f"ties with it, within {percent(TIE)} in {percent(SURE)} of systems",
        "cannot be told": "cannot be told from it",
    }
    for word, words in told.items():
        if names := close(plan, judged, word):
            text += f"; {words}: {', '.join(names)}"
    if plan.best.name != fastest.name:
        text += f". Proposed: {plan.best.name}, which lags least of those within {percent(WORTH)} of it"
    for one in judged.of:
        if one.choice is plan.best and plan.best.schedule != SHARED:
            text += f". {plan.best.name} beside {SHARED}: {words_of(one.speedup)}"
    return text + "."


def close(plan: Plan, judged: Judgements, word: Verdict) -> list[str]:
    """Names of those that are so beside the fastest: `tie`, or `cannot be told`."""
    fastest = plan.choices[0]
    return [
        f"{choice.name} ({percent(rate(choice) / rate(fastest) - 1, 1)})"
        for choice in plan.fastest_of_each
        if choice is not fastest
        and (speedup := judged.beside(fastest, choice)) is not None
        and verdict_of(speedup) == word
    ]


def searched(plan: Plan) -> list[str]:
    """Lines on how many candidates were looked at, and how sure the result is."""
    lines = []
    for exploration in plan.explorations:
        name, found = exploration.name, exploration.found
        if found is None:
            lines.append(f"{name}: {why_none(exploration)}")
            continue
        if exploration.only_simulated:
            lines.append(f"{name}: in simulation only, for a real run refuses all: {exploration.only_simulated}")
        refused = f"{exploration.refused:,} in turn a real run would refuse, " if exploration.refused else ""
        room = f"not proved: bounds leave room for {found.gap:.0%} less time"
        lines.append(
            f"{name}: {exploration.candidates:,} candidates, {exploration.unfit:,} do not fit memory, {refused}"
            f"{found.pruned:,} cannot be better by their bound, {exploration.parts} simulated in part, "
            f"{len(found.tried)} whole: "
            f"{'the best of the grid' if found.left is None else room}"
        )
    return lines


def as_json(plan: Plan, settings: list[str], seconds: float, judged: Judgements) -> dict[str, Any]:
    """The plan as plain values. seconds: that planning took."""
    return {
        "simulated": True,
        "verdict": verdict(plan, judged),
        "ties": close(plan, judged, "tie"),
        "speedups": [_speedup(one) for one in judged.of],
        "not_judged": judged.why_none,
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
                "name": exploration.name,
                "candidates": exploration.candidates,
                "unfit": exploration.unfit,
                "refused": exploration.refused,
                "pruned": exploration.found.pruned if exploration.found else 0,
                "gap": exploration.found.gap if exploration.found else None,
            }
            for exploration in plan.explorations
        ],
        "job": plain(plan.best.candidate.apply(plan.best.config, device_roles(plan.best.config))),
    }


def _speedup(one: Judgement) -> dict[str, Any]:
    """The speed-up over the colocated baseline, as plain values."""
    low, high = interval(one.speedup)
    return {
        "name": one.choice.name,
        "settings": layout(one.choice),
        "median": float(np.median(one.speedup)),
        "low": low,
        "high": high,
        "p_faster": p_faster(one.speedup),
        "verdict": one.verdict,
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
    lags_and_idle = ("mean lag", "worst lag", "idle rollout", "idle training")
    return Table(
        "The best of every schedule (simulated)",
        ("schedule", "samples/s", "tokens/s /device", *lags_and_idle, "of bound"),
        [
            (
                choice.name,
                f"{choice.outcome.samples_per_s:,.1f}",
                f"{choice.outcome.tokens_per_s_per_device:,.0f}",
                f"{choice.outcome.lag_mean:.2f}",
                f"{choice.outcome.lag_worst:.0f}",
                f"{abs(choice.outcome.rollout_idle):.0%}",
                f"{abs(choice.outcome.training_idle):.0%}",
                f"{choice.outcome.fraction_of_bound:.2f}",
            )
            for choice in plan.best_of_each
        ],
    )


def _judgements(plan: Plan, judged: Judgements) -> Table:
    baseline, *others = judged.of
    own = rate(baseline.choice)
    rows = [
        (plan.title(one.choice), f"{rate(one.choice) / own:.2f}", *figures_of(one.speedup), one.verdict)
        for one in others
    ]
    columns = ("schedule", "plan", "median", f"{SURE:.0%} interval", "P(faster)", "verdict")
    return Table(f"Times as fast as {SHARED} (simulated)", columns, rows)


def _layouts(plan: Plan) -> Table:
    rows = []
    for choice in plan.best_of_each:
        split, layout_ = choice.candidate.describe()
        rows.append((choice.name, split, f"{layout_}, micro-batch {choice.candidate.micro_groups}"))
    return Table("How they use the devices", ("schedule", "rollout + actor", "layout"), rows)


def _front(plan: Plan) -> Table:
    best = plan.choices[0].outcome.samples_per_s
    rows = []
    for choice in plan.front:
        rate = choice.outcome.samples_per_s
        rows.append((choice.name, f"{choice.outcome.lag_mean:.2f}", f"{rate:,.1f}", f"{rate / best:.1%}"))
    columns = ("schedule", "mean lag", "samples/s", "of the fastest")
    return Table("Throughput against mean lag: what nothing beats (simulated)", columns, rows)


def why_slower(slower: Choice, best: Choice) -> str:
    """A sentence: what costs `slower` more of its time than `best` of its own."""
    lost = 1 - best.outcome.seconds / slower.outcome.seconds
    head = f"{slower.name} needs {slower.outcome.seconds:.3g} s an iteration, {best.name} {best.outcome.seconds:.3g} s"
    if lost < WORTH:
        return (
            f"{head}: no difference worth its lag of {slower.outcome.lag_mean:.2f} against {best.outcome.lag_mean:.2f}."
        )
    seconds, cause = max(((of(slower) - of(best), cause) for of, cause in _CAUSES), key=lambda pair: pair[0])
    if seconds < _WORTH_SAYING * slower.outcome.seconds:
        return (
            f"{head}: its pools are no less busy, but the busiest has more to do: at least "
            f"{slower.outcome.bound:.3g} s, against {best.outcome.bound:.3g} s."
        )
    return f"{head}: {cause(slower, best)}."


def _idles(devices: str, slower: Choice, best: Choice, otherwise: str) -> str:
    mine, others = (abs(getattr(choice.outcome, f"{devices}_idle")) for choice in (slower, best))
    waiting = _waiting(slower, otherwise)
    return f"its {devices} devices do nothing for {mine:.0%} of the time (against {others:.0%}), {waiting}"


def _waiting(choice: Choice, otherwise: str) -> str:
    outcome = choice.outcome
    if outcome.longest_s < _TAIL * outcome.seconds:
        return f"waiting {otherwise}"
    return f"waiting for the tail: the longest response alone takes {outcome.longest_s:.3g} s"


def _transfer_shows(slower: Choice, best: Choice) -> str:
    return (
        f"its devices stand still for weights for {slower.outcome.exposed_s:.2g} s of an iteration "
        f"(against {best.outcome.exposed_s:.2g} s)"
    )


_CAUSES: tuple[tuple[Callable[[Choice], float], Callable[[Choice, Choice], str]], ...] = (
    (
        lambda choice: choice.outcome.rollout_idle * choice.outcome.seconds,
        lambda slower, best: _idles("rollout", slower, best, "for training and weights"),
    ),
    (
        lambda choice: choice.outcome.training_idle * choice.outcome.seconds,
        lambda slower, best: _idles("training", slower, best, "for samples"),
    ),
    (lambda choice: choice.outcome.exposed_s, _transfer_shows),
)
"""Seconds of an iteration that are lost, and the sentence that says so."""


def draw_plan(plan: Plan, path: Path, judged: Judgements) -> Path:
    """PNG at `path`: all that was simulated, and the front; the best of every schedule; and how sure it is."""
    job = plan.best.config
    devices, batch = devices_and_batch(job)
    title = f"{job.model.name} on {devices} · {batch} · simulated · costs {origin(job)}"
    return save_figure(path, title, lambda figure: _draw(figure, plan, judged))


def _draw(figure: Figure, plan: Plan, judged: Judgements) -> None:
    others = judged.of[1:]
    figure.set_size_inches(17.5 if others else 12.5, 1.8 + 0.45 * max(6, len(plan.best_of_each), len(others)))
    points, bars, *sure = figure.subplots(1, 3 if others else 2, width_ratios=(1.25, 1, 1) if others else (1.25, 1))
    names = sorted({choice.schedule for choice in plan.choices})
    colors = of_schedules(names)
    _draw_front(points, plan, colors)
    _draw_bars(bars, plan, colors)
    for axes in sure:
        _draw_speedups(axes, plan, others, colors)


def _draw_speedups(axes: Axes, plan: Plan, others: Sequence[Judgement], colors: dict[str, str]) -> None:
    """Speed-ups over taking turns, at 1: medians, intervals and verdicts."""
    ends = [interval(one.speedup) for one in others]
    for row, (one, (low, high)) in enumerate(zip(others, ends, strict=True)):
        median, color = float(np.median(one.speedup)), colors[one.choice.schedule]
        axes.barh(row, high - low, 0.5, left=low, color=color, alpha=0.4)
        axes.plot([median], [row], "o", color=color)
        text = f"{median:.2f}  {one.verdict}"
        axes.annotate(text, (high, row), (6, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color="0.35", linewidth=1.2)
    axes.set_yticks(range(len(ends)), [plan.title(one.choice) for one in others])
    axes.invert_yaxis()
    least, most = min(0.9, *(0.95 * low for low, _ in ends)), max(high for _, high in ends)
    axes.set(
        xlabel=f"times as fast as {SHARED} (simulated)",
        title=f"{SURE:.0%} of {DRAWS} systems drawn, and the median",
        xlim=(least, most + 0.6 * (most - least)),
    )
    axes.grid(axis="y", visible=False)


def _draw_front(axes: Axes, plan: Plan, colors: dict[str, str]) -> None:
    for schedule, color in colors.items():
        outcomes = [choice.outcome for choice in plan.choices if choice.schedule == schedule]
        x, y = [outcome.lag_mean for outcome in outcomes], [outcome.samples_per_s for outcome in outcomes]
        axes.scatter(x, y, s=26, color=color, alpha=0.75, label=schedule, linewidths=0)
    front = [(choice.outcome.lag_mean, choice.outcome.samples_per_s) for choice in plan.front]
    steps = [*front, (max(choice.outcome.lag_mean for choice in plan.choices), front[-1][1])]
    axes.step(*zip(*steps, strict=True), where="post", color="0.35", linewidth=1.2, zorder=0, label="not beaten")
    axes.set(xlabel="mean lag (iterations)", ylabel="samples/s (simulated)", ylim=(0, None), title="all that was tried")
    axes.legend(fontsize="small", loc="lower right")


def _draw_bars(axes: Axes, plan: Plan, colors: dict[str, str]) -> None:
    best = plan.best_of_each
    rates = [choice.outcome.samples_per_s for choice in best]
    axes.barh([choice.name for choice in best], rates, color=[colors[choice.schedule] for choice in best], height=0.7)
    for row, choice in enumerate(best):
        rate = choice.outcome.samples_per_s
        text = f"{rate:,.1f}  lag {choice.outcome.lag_mean:.2f}  {choice.candidate.describe()[0]}"
        axes.annotate(text, (rate, row), (5, 0), textcoords="offset points", va="center", fontsize="small")
    axes.invert_yaxis()
    axes.set(
        xlabel="samples/s (simulated)",
        title="the best of every schedule: samples/s, mean lag, devices",
        xlim=(0, 1.55 * max(rates)),
    )
    axes.grid(axis="y", visible=False)
