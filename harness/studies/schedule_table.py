"""The simulated table of every schedule under twelve conditions.

What is compared, and how the conditions are made, is said in the text that goes above the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist

import numpy as np

from harness.config import CostConfig, JobConfig, LengthsConfig
from harness.config.compose import DOCS, choices, compose_job
from harness.driver.recorder import Recorder
from harness.driver.session import simulate
from harness.metrics.atomic_files import write_text
from harness.metrics.samples import staleness_metrics

PAGE = DOCS.parent / "results/reference/simulated/schedule_table.md"

DEVICES, ITERATIONS, WARMUP = 16, 22, 2

GROUPS, GROUP, SLOTS = 32, 8, 32

SAMPLES = GROUPS * GROUP

TRAIN_S = 10.0
"""Seconds that the training pool (half of the devices) works on a batch."""

GENERATE_S = {"training is the bottleneck": 2.0, "both balance": 10.0, "generation is the bottleneck": 20.0}
"""Seconds that the rollout pool would take for a batch, if all its slots were always full."""

TAILS = {
    "light tail": LengthsConfig(kind="lognormal", mean=1000.0, sigma=0.3, cap=8000),
    "heavy tail": LengthsConfig(kind="lognormal", mean=1000.0, sigma=1.0, cap=8000),
}

TRANSFER_S = {"fast transfer": 0.1, "slow transfer": 3.0}

VARIANTS = {
    "separated_sync": {"sequential": "schedule.streaming=false", "streaming": "schedule.streaming=true"},
    "fully_async": {f"eta {eta}": f"schedule.max_staleness={eta}" for eta in ("0.5", "1", "2")},
    "k_step_off": {"k 2": "schedule.k=2"},
}


@dataclass(frozen=True)
class Condition:
    """A simulated condition: what is slow, how long the tail is, and how weights travel."""

    bottleneck: str
    tail: str
    transfer: str

    def __str__(self) -> str:
        return f"{self.bottleneck}, {self.tail}, {self.transfer}"


CONDITIONS = [Condition(*names) for names in product(GENERATE_S, TAILS, TRANSFER_S)]

INTRO = f"""\
Written by `make table OF=schedules`; nothing here was measured. Every row is a run of the schedule's own file on the
virtual clock (seed 0, {ITERATIONS} iterations, the first {WARMUP} left out): 32 prompts x 8 responses of 1,000 tokens
in the mean, 8,000 at most (log-normal, sigma 0.3 light, 1.0 heavy), on {DEVICES} devices, one engine each, {SLOTS}
slots, half the time of a decode step independent of the batch. `colocate_sync`, `colocate_async`,
`partial_rollout_sync`, `sorted_batches` and `tail_rounds` use all {DEVICES} for each phase in turn, with 0.5 s to give
the device back and 0.5 s to take it; the others give {DEVICES // 2} to rollout, which would need 2, 10 or 20 s a batch
if all its slots were always full, and {DEVICES // 2} to training, which takes {TRAIN_S:g} s a batch. A transfer takes
0.1 or 3 s over the network, from the host's memory 0.5 s at most. Reference and old log-probs are left out."""


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


TableStudy = Mapping[str, Mapping[str, ScheduleFigures]]
"""Condition -> schedule -> figures."""


def rows() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every schedule, with its variants: what it is called here, and its settings."""
    for schedule in choices("schedule"):
        for variant, setting in VARIANTS.get(schedule, {"": ""}).items():
            yield f"{schedule} {variant}".strip(), tuple(part for part in (f"schedule={schedule}", setting) if part)


def job(settings: tuple[str, ...], condition: Condition) -> JobConfig:
    """The job of one row under one condition."""
    config = compose_job(
        [
            *settings,
            "backend=virtual",
            "model=qwen7b",
            f"cluster.devices={DEVICES}",
            f"iterations={ITERATIONS}",
            f"warmup_iterations={WARMUP}",
            f"algorithm.batch_groups={GROUPS}",
            f"algorithm.group_size={GROUP}",
            "algorithm.micro_batch_groups=1",
            "algorithm.recompute_log_probs=false",
        ]
    )
    split = dict(config.schedule.split)
    if split["rollout"] != "actor":  # pools of their own: half and half
        split |= {"rollout": DEVICES // 2, "actor": DEVICES // 2}
    decode_s = decode_seconds(condition)
    transfer, train_pool = TRANSFER_S[condition.transfer], DEVICES // 2
    tokens = SAMPLES * mean_length(TAILS[condition.tail])
    cost = CostConfig(
        name="table",
        decode_step_s=0.5 * decode_s,
        decode_step_s_per_sample=0.5 * decode_s / SLOTS,
        prefill_s_per_token=0.0,
        log_prob_s_per_token=0.0,
        train_s_per_token=TRAIN_S * train_pool / tokens,
        train_step_s=0.0,
        call_s=0.0,
        weight_bytes=1.0,
        network_bytes_per_s=1.0 / transfer,
        host_bytes_per_s=1.0 / min(transfer, 0.5),
        sync_s=0.0,
        offload_s=0.5,
        reload_s=0.5,
        prompt_tokens=1,
        lengths=TAILS[condition.tail],
    )
    engine = replace(config.engine, slots=SLOTS)
    return replace(config, schedule=replace(config.schedule, split=split), cost=cost, engine=engine)


def mean_length(lengths: LengthsConfig) -> float:
    """Mean tokens of a capped log-normal, by its quantiles."""
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / 10_000) for i in range(10_000)])
    assert lengths.mean is not None
    tokens = lengths.mean * np.exp(lengths.sigma * quantiles - lengths.sigma**2 / 2)
    return float(np.minimum(tokens, lengths.cap).mean())


def decode_seconds(condition: Condition) -> float:
    """Seconds of a decode step with all slots full, so that the rollout pool, if it were always full, would generate a
    batch in GENERATE_S."""
    steps = mean_length(TAILS[condition.tail]) * SAMPLES / (SLOTS * DEVICES // 2)
    return GENERATE_S[condition.bottleneck] / steps


def figures(recorder: Recorder) -> ScheduleFigures:
    """Figures of a run, after warm-up."""
    timeline = recorder.timeline
    start, end = timeline.steady_window()
    late = [r for r in recorder.samples() if r.trained_iteration is not None and r.trained_iteration >= WARMUP]
    staleness = staleness_metrics(late)
    iterations = range(WARMUP, ITERATIONS)
    exposed = [timeline.iteration_metrics(i)["time/weight_sync_exposed_s"] for i in iterations]
    return ScheduleFigures(
        samples_per_s=len(late) / (end - start),
        lag_mean=staleness["staleness/mean"],
        lag_worst=staleness["staleness/max"],
        rollout_idle=timeline.idle("rollout"),
        training_idle=timeline.idle("actor"),
        exposed_s=float(np.mean(exposed)),
    )


def study(progress: Callable[[str], None] = lambda text: None) -> dict[str, dict[str, ScheduleFigures]]:
    """All rows under all conditions."""
    found: dict[str, dict[str, ScheduleFigures]] = {}
    for condition in CONDITIONS:
        progress(str(condition))
        found[str(condition)] = {name: figures(simulate(job(settings, condition), seed=0)) for name, settings in rows()}
    return found


def write_page(progress: Callable[[str], None]) -> Path:
    """Runs the study, and writes the page and, beside it, all figures as CSV."""
    found = study(progress)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    write_text(PAGE.with_suffix(".csv"), as_csv("bottleneck,tail,transfer", found))
    write_text(PAGE, page(INTRO, found))
    return PAGE


def as_csv(conditions: str, study: TableStudy) -> str:
    """A row for each condition and schedule; units as `ScheduleFigures` has them. conditions: their columns."""
    names = [one.name for one in fields(ScheduleFigures)]
    lines = [",".join([conditions, "schedule", *names])]
    for condition, rows in study.items():
        for schedule, its in rows.items():
            values = (f"{abs(getattr(its, name)):.4g}" for name in names)  # an idle share may be -0
            lines.append(",".join([condition.replace(", ", ","), schedule, *values]))
    return "\n".join(lines) + "\n"


def page(intro: str, study: TableStudy) -> str:
    """The whole page: what was compared, every schedule's rate against the best one, and where `half_step` pays."""
    title = f"# Every schedule under {len(study)} conditions (simulated)"
    end = f"Every condition by itself, lags, idle shares and exposed times: [{PAGE.stem}.csv]({PAGE.stem}.csv)."
    return "\n\n".join([title, intro, _rates(study), _verdict(study), end]) + "\n"


def _rates(study: TableStudy) -> str:
    """A row a schedule, a column a bottleneck: the lowest and the highest share over its conditions."""
    bottlenecks = list(dict.fromkeys(condition.partition(", ")[0] for condition in study))
    lines = [
        "## Samples per second, against the best of the condition",
        "",
        "Lowest to highest share over tails and transfers.",
        "",
        f"| schedule | {' | '.join(bottlenecks)} |",
        f"|---|{'---:|' * len(bottlenecks)}",
    ]
    for name in next(iter(study.values())):
        shares = [_between(study, bottleneck, name) for bottleneck in bottlenecks]
        lines.append(f"| {name} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _between(study: TableStudy, bottleneck: str, schedule: str, against: str | None = None) -> str:
    """Least and most of a schedule's rate over that of another, or the best, under the conditions of a bottleneck."""
    shares = []
    for condition, rows in study.items():
        if condition.startswith(bottleneck):
            best = max(its.samples_per_s for its in rows.values())
            shares.append(rows[schedule].samples_per_s / (rows[against].samples_per_s if against else best))
    return f"{min(shares):.0%} to {max(shares):.0%}"


def _verdict(study: TableStudy) -> str:
    """half_step against delayed_update, which differs from it in nothing but how far ahead and when engines update."""
    bottlenecks = dict.fromkeys(condition.partition(", ")[0] for condition in study)
    kept = [f"{_between(study, one, 'half_step', 'delayed_update')} where {one}" for one in bottlenecks]
    rows = next(iter(study.values()))
    half, whole = rows["half_step"], rows["delayed_update"]
    return (
        "## What half a step costs\n\n"
        "Of the samples per second of `delayed_update`, which has the same pools and transport and a mean lag of "
        f"{whole.lag_mean:.2f} instead of {half.lag_mean:.2f}, `half_step` keeps {'; '.join(kept)}. Half a step is "
        "free as long as a batch is generated, its longest responses too, in the time that half a batch is trained; "
        "with eta = 1 it has the time of a whole one."
    )
