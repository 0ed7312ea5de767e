"""The simulated table of every schedule: what is slow, tools that answer late, and more devices with larger batches.

What is compared, and how the conditions are made, is said in the text that goes above the tables."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from harness.config import CostConfig, JobConfig, LatencyConfig, LengthsConfig
from harness.config.compose import DOCS, choices, compose_job, make_schedule
from harness.driver.event_model import FastSteps, fast_steps
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import markdown_table
from harness.metrics.tables import write_csv
from harness.report.templates import rendered

PAGE = DOCS.parent / "results/reference/simulated/schedule_table.md"

DEVICES, WARMUP = 16, 2

GROUPS_PER_DEVICE, GROUP, SLOTS = 2, 8, 32

TRAIN_S = 10.0  # seconds that the training pool (half of the devices) works on a batch
GENERATE_S = {"training is the bottleneck": 2.0, "both balance": 10.0, "generation is the bottleneck": 20.0}
"""Seconds that the rollout pool would take for a batch, if all its slots were always full."""

TAILS = {
    "light tail": LengthsConfig(kind="lognormal", mean=1000.0, sigma=0.3, cap=8000),
    "heavy tail": LengthsConfig(kind="lognormal", mean=1000.0, sigma=1.0, cap=8000),
}

TRANSFER_S = {"fast transfer": 0.1, "slow transfer": 3.0}

TURNS = LengthsConfig(kind="lognormal", mean=4.0, sigma=0.7, cap=16)

TURN_TOKENS = LengthsConfig(kind="lognormal", mean=250.0, sigma=0.5, cap=2000)

OBSERVATION = LengthsConfig(kind="constant", mean=100.0, cap=100)

TOOLS = {
    "no tools": None,
    "tools at once": LatencyConfig(),
    "tools of 10 s": LatencyConfig(kind="lognormal", mean=10.0, sigma=1.0),
}
"""Latency of the tool that a sample calls between two turns; None where it has one turn."""

VARIANTS = {
    "separated_sync": {"sequential": "schedule.streaming=false", "streaming": "schedule.streaming=true"},
    "fully_async": {
        **{f"eta {eta}": f"schedule.max_staleness={eta}" for eta in ("0.5", "1", "2")},
        "eta 2 completion": "schedule.max_staleness=2 schedule.order=completion",
    },
    "k_step_off": {"k 2": "schedule.k=2"},
    "windowed": {"": "", "window 4": "schedule.max_staleness=1 schedule.window=4"},
}


@dataclass(frozen=True)
class Condition:
    """A simulated condition: what is slow, the tail, how weights travel, how late tools answer, how many devices."""

    bottleneck: str
    tail: str
    transfer: str
    tools: str = "no tools"
    devices: int = DEVICES

    @property
    def samples(self) -> int:
        """Samples of a batch."""
        return GROUPS_PER_DEVICE * self.devices * GROUP

    @property
    def iterations(self) -> int:
        """Iterations of a run: fewer where they take long to simulate."""
        return 12 if self.tools != "no tools" or self.devices > 256 else 22


CONDITIONS = [Condition(*names) for names in product(GENERATE_S, TAILS, TRANSFER_S)]

AGENTS = [Condition("both balance", "light tail", "fast transfer", tools) for tools in TOOLS if TOOLS[tools]]

SIZES = [Condition("both balance", "heavy tail", "fast transfer", devices=devices) for devices in (32, 256, 1024)]


@dataclass(frozen=True)
class ScheduleFigures:
    """Figures of a schedule under a condition, after warm-up. Seconds are per iteration (exposed: and device), idle a
    share of the time."""

    samples_per_s: float
    lag_mean: float
    lag_worst: float
    rollout_idle: float
    training_idle: float
    exposed_s: float


TableStudy = Mapping[Condition, Mapping[str, ScheduleFigures]]  # condition -> schedule -> figures


def rows() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every schedule, with its variants: what it is called here, and its settings."""
    for schedule in choices("schedule"):
        for variant, setting in VARIANTS.get(schedule, {"": ""}).items():
            yield f"{schedule} {variant}".strip(), (f"schedule={schedule}", *setting.split())


def job(settings: tuple[str, ...], condition: Condition) -> JobConfig:
    """The job of one row under one condition."""
    config = compose_job(
        [
            *settings,
            "backend=virtual",
            "model=qwen7b",
            f"cluster.devices={condition.devices}",
            f"iterations={condition.iterations}",
            f"warmup_iterations={WARMUP}",
            f"algorithm.batch_groups={condition.samples // GROUP}",
            f"algorithm.group_size={GROUP}",
            "algorithm.micro_batch_groups=1",
            "algorithm.recompute_log_probs=false",
        ]
    )
    decode_s = decode_seconds(condition)
    transfer, train_pool = TRANSFER_S[condition.transfer], condition.devices // 2
    tokens = condition.samples * mean_length(TAILS[condition.tail])
    cost = costs_of(
        "table",
        TAILS[condition.tail],
        decode_step_s=0.5 * decode_s,
        decode_step_s_per_sample=0.5 * decode_s / SLOTS,
        train_s_per_token=TRAIN_S * train_pool / tokens,
        network_bytes_per_s=1.0 / transfer,
        host_bytes_per_s=1.0 / min(transfer, 0.5),
        offload_s=0.5,
        reload_s=0.5,
    )
    if latency := TOOLS[condition.tools]:
        cost = replace(cost, turns=TURNS, lengths=TURN_TOKENS, observation_tokens=OBSERVATION, tool_latency=latency)
    return on_pools(config, dict.fromkeys(("rollout", "actor"), train_pool), cost, SLOTS)


def costs_of(name: str, lengths: LengthsConfig, **costs: float) -> CostConfig:
    """Costs of a study's job: what is not given takes no time, and all weights are a byte."""
    nothing = (
        "prefill_s_per_token",
        "log_prob_s_per_token",
        "train_step_s",
        "call_s",
        "sync_s",
        "offload_s",
        "reload_s",
    )
    given: dict[str, Any] = dict.fromkeys(nothing, 0.0) | costs
    return CostConfig(name=name, lengths=lengths, weight_bytes=1.0, prompt_tokens=1, **given)


def on_pools(config: JobConfig, pools: Mapping[str, int], cost: CostConfig, slots: int) -> JobConfig:
    """The job at these costs, on these pools where its roles have some of their own."""
    split = dict(config.schedule.split)
    if split["rollout"] != "actor":
        split |= pools
    schedule, engine = replace(config.schedule, split=split), replace(config.engine, slots=slots)
    return replace(config, schedule=schedule, cost=cost, engine=engine)


def mean_length(lengths: LengthsConfig) -> float:
    """Mean tokens of a capped log-normal, by its quantiles."""
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / 10_000) for i in range(10_000)])
    assert lengths.mean is not None
    tokens = lengths.mean * np.exp(lengths.sigma * quantiles - lengths.sigma**2 / 2)
    return float(np.minimum(tokens, lengths.cap).mean())


def decode_seconds(condition: Condition) -> float:
    """Seconds of a decode step with all slots full, by which a rollout pool always full makes a batch in GENERATE_S."""
    steps = mean_length(TAILS[condition.tail]) * condition.samples / (SLOTS * condition.devices // 2)
    return GENERATE_S[condition.bottleneck] / steps


def figures(steps: FastSteps, samples: int) -> ScheduleFigures:
    """Figures of a run, after warm-up. samples: of a batch."""
    seconds = float(steps.seconds[WARMUP:].sum())
    idle = {role: 1 - float(busy[WARMUP:].sum()) / seconds for role, busy in steps.busy_s.items()}
    return ScheduleFigures(
        samples_per_s=samples * len(steps.seconds[WARMUP:]) / seconds,
        lag_mean=float(steps.lag_mean[WARMUP:].mean()),
        lag_worst=float(steps.lag_worst[WARMUP:].max()),
        rollout_idle=idle["rollout"],
        training_idle=idle["actor"],
        exposed_s=float(steps.exposed_s[WARMUP:].mean()),
    )


def study(progress: Callable[[str], None] = lambda text: None) -> dict[Condition, dict[str, ScheduleFigures]]:
    """All rows under all conditions."""
    found: dict[Condition, dict[str, ScheduleFigures]] = {}
    for condition in (*CONDITIONS, *AGENTS, *SIZES):
        progress(", ".join(map(str, astuple(condition))))
        jobs = {name: job(settings, condition) for name, settings in rows()}
        if TOOLS[condition.tools]:  # lent engines refuse samples of several turns
            jobs = {name: config for name, config in jobs.items() if not make_schedule(config).lends}
        runs = {name: fast_steps(config, seed=0) for name, config in jobs.items()}
        found[condition] = {name: figures(steps, condition.samples) for name, steps in runs.items()}
    return found


def write_page(progress: Callable[[str], None]) -> Path:
    """Runs the study, and writes the page and, beside it, all figures as CSV."""
    started = time.process_time()
    found = study(progress)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    write_csv(PAGE.with_suffix(".csv"), as_table(found))
    write_text(PAGE, page(found, (time.process_time() - started) / 60))
    return PAGE


def as_table(study: TableStudy) -> pd.DataFrame:
    """A row for each condition and schedule; units as `ScheduleFigures` has them."""
    return pd.DataFrame(
        asdict(condition) | {"schedule": schedule} | {name: abs(value) for name, value in asdict(its).items()}  # -0
        for condition, rows in study.items()
        for schedule, its in rows.items()
    )


def page(study: TableStudy, minutes: float) -> str:
    """The whole page: what was compared, every schedule's rate against the best one, where `half_step` pays, and what
    slow tools and more devices leave of each rate."""
    usual, agents, sizes = ({each: study[each] for each in those} for those in (CONDITIONS, AGENTS, SIZES))
    rows = next(iter(usual.values()))
    rates = {name: [_between(usual, one, name) for one in GENERATE_S] for name in rows}
    values = {
        "WARMUP": WARMUP,
        "GROUP": GROUP,
        "DEVICES": DEVICES,
        "SLOTS": SLOTS,
        "TRAIN_S": TRAIN_S,
        "TURNS": TURNS,
        "TURN_TOKENS": TURN_TOKENS,
        "OBSERVATION": OBSERVATION,
        "GROUPS_PER_DEVICE": GROUPS_PER_DEVICE,
        "PAGE": PAGE,
        "minutes": minutes,
        "rates": _table([*GENERATE_S], rates),
        "kept": [f"{_between(usual, one, 'half_step', 'delayed_update')} where {one}" for one in GENERATE_S],
        "half": rows["half_step"],
        "whole": rows["delayed_update"],
        "agents": _table(["samples/s at once", "after 10 s", "left", "of the best", "lag mean"], _agents(agents)),
        "sizes": _table(
            [*(f"{condition.devices:,} devices" for condition in sizes), "left", "lag mean"], _sizes(sizes)
        ),
    }
    return rendered(__package__, "schedule_table.md.jinja", values)


def _table(heads: list[str], rows: Mapping[str, list[str]]) -> str:
    """A row a schedule."""
    return markdown_table(["schedule", *heads], [[name, *cells] for name, cells in rows.items()])


def _between(study: TableStudy, bottleneck: str, schedule: str, against: str | None = None) -> str:
    """Least and most of a schedule's rate over that of another, or the best, under the conditions of a bottleneck."""
    shares = []
    for condition, rows in study.items():
        if condition.bottleneck == bottleneck:
            best = max(its.samples_per_s for its in rows.values())
            shares.append(rows[schedule].samples_per_s / (rows[against].samples_per_s if against else best))
    return f"{min(shares):.0%} to {max(shares):.0%}"


def _agents(study: TableStudy) -> dict[str, list[str]]:
    """Rates with tools that answer at once and late, and what is left."""
    before, after = study.values()
    best = max(its.samples_per_s for its in after.values())
    return {
        name: [
            f"{its.samples_per_s:.2f}",
            f"{after[name].samples_per_s:.2f}",
            f"{after[name].samples_per_s / its.samples_per_s:.0%}",
            f"{after[name].samples_per_s / best:.0%}",
            f"{after[name].lag_mean:.2f}",
        ]
        for name, its in before.items()
    }


def _sizes(study: TableStudy) -> dict[str, list[str]]:
    """Rates per device, and what the largest size leaves of that of the smallest."""
    first, *_, last = study.values()
    return {
        name: [
            *(f"{rows[name].samples_per_s / condition.devices:.3f}" for condition, rows in study.items()),
            f"{last[name].samples_per_s / its.samples_per_s * SIZES[0].devices / SIZES[-1].devices:.0%}",
            f"{last[name].lag_mean:.2f}",
        ]
        for name, its in first.items()
    }
