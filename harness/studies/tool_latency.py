"""The simulated table of every schedule with samples of several turns and slow tools.

The job is that of `schedule_table` where generation and training balance, with its tokens spread over turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from harness.config import CostConfig, JobConfig, LatencyConfig, LengthsConfig
from harness.config.compose import DOCS
from harness.driver.session import simulate
from harness.metrics.atomic_files import write_text
from harness.studies.schedule_table import Condition, ScheduleFigures, as_csv, figures, job, rows

PAGE = DOCS.parent / "results/reference/simulated/agentic.md"
TURNS = LengthsConfig(kind="lognormal", mean=4.0, sigma=0.7, cap=16)
TURN_TOKENS = LengthsConfig(kind="lognormal", mean=250.0, sigma=0.5, cap=2000)
OBSERVATION = LengthsConfig(kind="constant", mean=100.0, cap=100)
BASE = Condition("both balance", "light tail", "fast transfer")
LATENCIES = {
    "no latency": LatencyConfig(),
    "1 s": LatencyConfig(mean=1.0),
    "10 s": LatencyConfig(mean=10.0),
    "heavy tail": LatencyConfig(kind="lognormal", mean=10.0, sigma=2.0),
}

INTRO = f"""\
Written by `make table OF=agents`; nothing here was measured. The job of [schedule_table.md](schedule_table.md) where
both balance, with a light tail and fast transfers. A sample has {TURNS.mean:g} turns in the mean (log-normal, sigma
{TURNS.sigma:g}, {TURNS.cap} at most) of {TURN_TOKENS.mean:g} tokens ({TURN_TOKENS.sigma:g}, {TURN_TOKENS.cap:,} at
most), and after each but the last it reads {OBSERVATION.mean:g} and waits for its tool: not at all, 1 s, 10 s, or a
log-normal time of 10 s in the mean with sigma 2 (half below 1.4 s, one of a hundred above 140 s). Settings, and what a
waiting sample holds: [simulator.md](../../../docs/simulator.md#samples-of-several-turns). A batch waits for its slowest
sample, whose latencies add up; an engine whose samples all wait is idle."""

Study = Mapping[str, Mapping[str, ScheduleFigures]]
"""Latency -> schedule -> figures."""


def agentic(config: JobConfig, latency: LatencyConfig) -> JobConfig:
    """The same job with its tokens in turns."""
    assert isinstance(config.cost, CostConfig)
    cost = replace(config.cost, turns=TURNS, lengths=TURN_TOKENS, observation_tokens=OBSERVATION, tool_latency=latency)
    return replace(config, cost=cost)


def study(progress: Callable[[str], None] = lambda text: None) -> dict[str, dict[str, ScheduleFigures]]:
    """Every schedule under every latency."""
    found: dict[str, dict[str, ScheduleFigures]] = {}
    for name, latency in LATENCIES.items():
        progress(name)
        found[name] = {row: figures(simulate(agentic(job(its, BASE), latency), seed=0)) for row, its in rows()}
    return found


def write_page(progress: Callable[[str], None]) -> Path:
    """Runs the study, and writes the page and, beside it, all figures as CSV."""
    found = study(progress)
    write_text(PAGE.with_suffix(".csv"), as_csv("tool_latency", found))
    write_text(PAGE, page(found))
    return PAGE


def page(study: Study) -> str:
    """The page: what was simulated, and what each latency leaves of each schedule's throughput."""
    parts = ["# Turns and tools: what latency does to every schedule (simulated)", INTRO, kept_table(study)]
    return "\n\n".join([*parts, f"Lags, idle shares and exposed times: [{PAGE.stem}.csv]({PAGE.stem}.csv)."]) + "\n"


def kept_table(study: Study) -> str:
    """Samples per second, and the share of those without latency that is left."""
    without, *others = study
    lines = [
        "## Throughput",
        "",
        "Samples per second without latency, and the share of them that is left with it.",
        "",
        "| schedule | " + " | ".join(study) + " |",
        "|---|" + "---:|" * len(study),
    ]
    for row, before in study[without].items():
        cells = [f"{before.samples_per_s:.2f}"]
        for latency in others:
            now = study[latency][row].samples_per_s
            cells.append(f"{now / before.samples_per_s:.0%}")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
