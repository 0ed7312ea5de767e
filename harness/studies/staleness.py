"""The mean lag in closed form beside the simulated one, over random jobs, with the derivation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from harness.config import JobConfig, LengthsConfig
from harness.config.compose import DOCS, compose_job
from harness.driver.event_model import fast_steps
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import CELLS, markdown_table
from harness.planner.mean_lag import (
    BALANCED,
    REGIMES,
    Flow,
    by_applied_compute,
    drawn,
    in_completion_order,
    in_fifo_order,
    newer,
)
from harness.report.drawing import legend_below, panels, save_in_every_format
from harness.report.palette import MUTED, OTHER
from harness.report.templates import rendered
from harness.studies.schedule_table import costs_of, on_pools

PAGE = DOCS.parent / "results/reference/simulated/staleness.md"
JOBS, ITERATIONS = 160, 96
TAILS = (0.1, 0.3, 0.6, 1.0)


def job(flow: Flow, settings: Sequence[str], iterations: int = ITERATIONS) -> JobConfig:
    """The job under a schedule, by its settings."""
    config = compose_job(
        [
            *("backend=virtual", "model=qwen7b", f"cluster.devices={flow.engines + 1}", f"iterations={iterations}"),
            *(f"algorithm.batch_groups={flow.batch}", f"algorithm.group_size={flow.group}"),
            *(f"algorithm.micro_batch_groups={1 if flow.streamed else flow.batch}", *settings),
            "algorithm.recompute_log_probs=false",
        ]
    )
    cost = costs_of(
        "staleness",
        flow.lengths,
        decode_step_s=flow.step_s,
        decode_step_s_per_sample=flow.sample_s,
        train_s_per_token=flow.train_s / (flow.batch * flow.group * float(drawn(flow.lengths, flow.group).mean())),
        network_bytes_per_s=1 / flow.transfer_s,
        host_bytes_per_s=1 / flow.transfer_s,
    )
    return on_pools(config, {"rollout": flow.engines, "actor": 1}, cost, flow.slots)


def simulated(flow: Flow, settings: Sequence[str], iterations: int = ITERATIONS) -> tuple[float, float]:
    """Mean lag of the first tokens of groups, and of all tokens, in the third quarter of a run."""
    found, quarter = fast_steps(job(flow, settings, iterations), seed=0), slice(iterations // 2, -iterations // 4)
    return float(found.lag_first[quarter].mean()), float(found.lag_mean[quarter].mean())


def fully_async(flow: Flow, *more: str) -> tuple[str, ...]:
    """The settings of this schedule, as far ahead as the flow says."""
    return ("schedule=fully_async", f"schedule.max_staleness={flow.eta}", *more)


def flows(random: np.random.Generator, count: int, tails: Sequence[float] = TAILS) -> Iterator[Flow]:
    """Random jobs, of each tail equally many."""
    for number in range(count):
        lengths = LengthsConfig(kind="lognormal", mean=100.0, sigma=tails[number % len(tails)], cap=1000)
        engines, slots, batch, group = map(int, map(random.choice, ((1, 2, 3, 4), (16, 32), (8, 16), (4, 8))))
        sample_s, rho = float(random.choice((0.0, 1e-4, 3e-4))), random.uniform(0.3, 1.5)
        eta = float(random.choice((1, 2, 4, 8, 32) if rho < 1 - BALANCED else (1, 2, 4, 8)))  # a full queue takes long
        flow = Flow(engines, slots, batch, group, lengths, 0.01, sample_s, 1.0, 0.02, eta)
        yield replace(flow, train_s=flow.generate_s * rho, streamed=bool(random.integers(2)))


BUSY = Flow(2, 32, 8, 4, LengthsConfig(kind="lognormal", mean=100.0, sigma=0.3, cap=1000), 0.01, 0.0, 1.6, 0.02, 2.0)
"""Training takes twice as long as rollout, whose engines have slots for two batches."""
FIXED: dict[str, tuple[str, float]] = {
    "colocate_sync": ("0", 0.0),
    "separated_sync": ("0", 0.0),
    "one_step_off": ("1", 1.0),
    "delayed_update": ("1", 1.0),
    "k_step_off schedule.k=3": ("k + (k - 1) / 2", 4.0),
    "half_step": ("1/2", 0.5),
    "sorted_batches schedule.batches=2": ("(k - 1) / 2", 0.5),
    "rolling_update schedule.max_staleness=2": ("eta", 2.0),
    "fully_async schedule.max_staleness=2": ("eta", 2.0),
    "fully_async schedule.max_staleness=2.5": ("eta", 2.5),
    "fully_async schedule.max_staleness=2 schedule.publish_every=3": ("eta - (k - 1) / 2", 1.0),
}
"""The mean lag of schedules that have one in closed form, in words and as a number, where training is slower."""


@dataclass(frozen=True)
class Case:
    """A job: the lag of first tokens in both orders, that of all tokens in fifo order, and each formula's."""

    flow: Flow
    fifo: float
    fifo_formula: float
    tokens: float
    tokens_formula: float
    completion: float
    completion_formula: float
    applied_compute: float

    @property
    def free(self) -> bool:
        """Whether rollout is slower, and groups begin before the dispatch rule could keep them from it."""
        return self.flow.regime == REGIMES[0] and self.fifo_formula < 0.9 * self.flow.eta


def study(progress: Callable[[str], None] = lambda text: None, count: int = JOBS) -> list[Case]:
    """Random jobs in both orders."""
    found = []
    for number, flow in enumerate(flows(np.random.default_rng(0), count)):
        progress(f"job {number + 1} of {count}")
        (fifo, tokens), (completion, _) = (
            simulated(flow, fully_async(flow, f"schedule.order={order}")) for order in ("fifo", "completion")
        )
        first = in_fifo_order(flow)
        formulas = in_completion_order(flow), by_applied_compute(flow)
        found.append(Case(flow, fifo, first, tokens, first - newer(flow), completion, *formulas))
    return found


def write_page(progress: Callable[[str], None]) -> Path:
    """Runs the study, and writes the page and, beside it, all figures as CSV, and their picture."""
    cases = study(progress)
    fixed = {name: simulated(BUSY, f"schedule={name}".split())[0] for name in FIXED}
    title = "Mean lag of first tokens, formula and simulation · simulated"
    save_in_every_format(PAGE.parent, PAGE.stem, title, draw_formulas, as_table(cases))
    write_text(PAGE, page(cases, fixed))
    return PAGE


def as_table(cases: Sequence[Case]) -> pd.DataFrame:
    """A row for each job; seconds, lags in iterations."""
    figures = [one.name for one in fields(Case) if one.name != "flow"]
    own = ("engines", "slots", "batch", "group", "generate_s", "train_s", "transfer_s", "eta", "streamed", "regime")
    rows = [
        {"sigma": case.flow.lengths.sigma}
        | {name: getattr(case.flow, name) for name in own}
        | {name: getattr(case, name) for name in figures}
        for case in cases
    ]
    return pd.DataFrame(rows)


def draw_formulas(figure: Figure, data: pd.DataFrame) -> None:
    """Each formula over the simulated lag."""
    colors = dict(zip(TAILS, CELLS, strict=False))
    made = panels(figure, len(PAIRS), 20, 24)
    for axes, (title, (simulated_by, formula)) in zip(made, PAIRS.items(), strict=True):
        for sigma, those in data.groupby("sigma"):
            style: Any = {
                "color": colors[float(str(sigma))],
                "markersize": 3,
                "alpha": 0.7,
                "label": f"sigma {sigma:g}",
            }
            axes.plot(those[simulated_by], those[formula], "o", **style)
        axes.axline((0, 0), slope=1, color=OTHER, linewidth=1, zorder=0)
        axes.set(title=fill(title, 24), xlabel="simulated (iterations)")
    figure.supylabel("formula (iterations)", fontsize="medium", color=MUTED)
    legend_below(figure, made[0].get_legend_handles_labels()[0])


def error(cases: Sequence[Case], simulated_by: str, formula: str) -> str:
    """Mean and largest distance of a formula from the simulation."""
    apart = [abs(getattr(case, simulated_by) - getattr(case, formula)) for case in cases]
    return f"{np.mean(apart):.2f} ({max(apart):.2f})" if apart else "-"


PAIRS = {
    "fifo": ("fifo", "fifo_formula"),
    "completion": ("completion", "completion_formula"),
    "completion, Applied Compute": ("completion", "applied_compute"),
}
"""The lag that was simulated, and the formula beside it, by what they are called."""
TOKENS = {"fifo, all tokens": ("tokens", "tokens_formula")}


def _errors(heading: str, rows: Mapping[str, list[Case]], pairs: Mapping[str, tuple[str, str]]) -> str:
    cells = [[name, f"{len(those)}", *(error(those, *pair) for pair in pairs.values())] for name, those in rows.items()]
    return markdown_table([heading, "jobs", *pairs], cells)


def page(cases: Sequence[Case], fixed: Mapping[str, float]) -> str:
    """The page: how far the formulas are from the simulation, where they part, and why."""
    regimes = {regime: [case for case in cases if case.flow.regime == regime] for regime in REGIMES}
    free = [case for case in cases if case.free]
    held = [case for case in regimes[REGIMES[0]] if not case.free]
    tails = {f"{sigma:g}": [case for case in free if case.flow.lengths.sigma == sigma] for sigma in TAILS}
    by_sigma = list(tails.values())

    def over(those: Sequence[Case], more: str, less: str = "completion") -> float:
        return float(np.mean([getattr(case, more) - getattr(case, less) for case in those])) if those else math.nan

    constants = {"JOBS": JOBS, "ITERATIONS": ITERATIONS, "TAILS": TAILS, "BUSY": BUSY, "PAGE": PAGE}
    values = {
        "over": over,
        "error": error,
        "apart": _errors("", regimes, PAIRS),
        "by_sigma": _errors("sigma", tails, PAIRS | TOKENS),
        "free": free,
        "held": held,
        "near": [case for case in (*free, *held) if 0.7 * case.flow.eta < case.fifo_formula < case.flow.eta],
        "whole": [case for case in by_sigma[0] if not case.flow.streamed],
        "streamed": [[case for case in those if case.flow.streamed] for those in by_sigma],
        "rho": float(np.mean([case.flow.train_s / case.flow.generate_s for case in free])) if free else math.nan,
        "fixed": _fixed(fixed),
    }
    return rendered(__package__, "staleness.md.jinja", constants | values)


def _fixed(simulated_by: Mapping[str, float]) -> str:
    rows = ((name, *FIXED[name], lag) for name, lag in simulated_by.items())
    cells = [[name, formula, f"{value:g}", f"{lag:.2f}"] for name, formula, value, lag in rows]
    return markdown_table(("schedule", "formula", "is", "simulated"), cells)
