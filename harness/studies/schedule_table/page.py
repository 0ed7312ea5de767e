"""docs/schedule_table.md as text: figures of every schedule under several conditions, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """One schedule under one condition, after warm-up. Seconds are per iteration (exposed: and device), idle a share
    of the time."""

    samples_per_s: float
    lag_mean: float
    lag_worst: float
    rollout_idle: float
    training_idle: float
    exposed_s: float


Study = Mapping[str, Mapping[str, Figures]]
"""Condition -> schedule -> figures."""

_FREE = 0.98
_WHY = (
    "When version v arrives, engines may start the second half of batch v and the first half of batch v + 1; the "
    "trainer has the first half of batch v, which is half of its work. So half a step is free as long as a batch is "
    "generated, its longest responses too, in the time that half a batch is trained; with eta = 1 it has the time of a "
    "whole one."
)

_HEAD = (
    "| schedule | samples/s | against the best | lag mean | lag worst | rollout idle | training idle | exposed s |",
    "|---|---:|---:|---:|---:|---:|---:|---:|",
)


def page(intro: str, study: Study) -> str:
    """The whole page: what was compared, where `half_step` pays, then a table per condition."""
    parts = [f"# Every schedule under {len(study)} conditions (simulated)", intro, _verdict(study)]
    for condition, rows in study.items():
        parts += [f"## {condition[0].upper()}{condition[1:]}", condition_table(rows)]
    return "\n\n".join(parts) + "\n"


def condition_table(rows: Mapping[str, Figures]) -> str:
    """One condition, a row per schedule in the order given."""
    best = max(figures.samples_per_s for figures in rows.values())
    lines = [
        f"| {name} | {f.samples_per_s:.2f} | {f.samples_per_s / best:.0%} | {f.lag_mean:.2f} | {f.lag_worst:.0f} "
        f"| {f.rollout_idle:.0%} | {abs(f.training_idle):.0%} | {f.exposed_s:.2f} |"
        for name, f in rows.items()
    ]
    return "\n".join([*_HEAD, *lines])


def _verdict(study: Study) -> str:
    """half_step against delayed_update, which differs from it in nothing but how far ahead and when engines update."""
    lines = [
        "## Where half a step is free, and where it costs",
        "",
        "`half_step` against `delayed_update`: the same pools and transport, a lag of at most a half instead of one.",
        "",
        "| condition | throughput kept | mean lag | instead of |",
        "|---|---:|---:|---:|",
    ]
    free = []
    for condition, rows in study.items():
        half, whole = rows["half_step"], rows["delayed_update"]
        kept = half.samples_per_s / whole.samples_per_s
        free += [condition] if kept >= _FREE else []
        lines.append(f"| {condition} | {kept:.0%} | {half.lag_mean:.2f} | {whole.lag_mean:.2f} |")
    where = "; ".join(free) or "nowhere"
    told = f"Free (at least {_FREE:.0%} kept): {where}. Elsewhere it costs what the table says. {_WHY}"
    return "\n".join([*lines, "", told])
