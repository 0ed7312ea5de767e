"""Does staleness cost learning: every schedule under every correction, real runs of the tiny model.

    python -m tests.benchmarks.bench_convergence [--seeds 0 1 2] [setting=value ...]

Makes one run after another, the first seed of all cells before the others, and leaves out what is done already. A run
that fails is named at the end and stops no other. Then prints Markdown tables of exact
match beside the measured lag, and draws the curves into <results>/convergence.png.

At lag 0 `tis` and `clip` are the same update, bit for bit, so the two schedules that have no lag run `tis` for the
first seed only, to show it. All runs start from the same warm start; a seed decides prompts and draws. On two cores
they take about an hour.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter
from rich.console import Console

from harness.campaigns.cells import CellRequest, resolve_cell
from harness.campaigns.execution import Runs, print_failures, run_cells
from harness.cli.forked_runs import ForkedRuns
from harness.cli.main import RESULTS
from harness.config import JobConfig
from harness.config.compose import compose_job
from harness.config.machine import this_machine
from harness.metrics.done import MODEL, is_done
from harness.metrics.run_files import load_metrics, load_samples, run_directory
from harness.report.palette import COLORBLIND
from harness.report.plots import save_figure
from tests.benchmarks.held_out import held_out_exact_match

COMMON = (
    "experiment=convergence",
    "backend=real",
    "iterations=70",
    "cluster.devices=3",
    "cluster.oversubscribe=true",
    "algorithm.micro_batch_groups=8",
    "algorithm.recompute_log_probs=false",
)
APART = ("schedule.split.rollout=2", "schedule.split.actor=1")
SCHEDULES = {
    "colocate_sync": ("schedule=colocate_sync", "cluster.devices=1"),
    "separated_sync": ("schedule=separated_sync", *APART),
    "half_step": ("schedule=half_step", *APART),
    "one_step_off": ("schedule=one_step_off", *APART),
    "delayed_update": ("schedule=delayed_update", *APART),
    "fully_async, 2": ("schedule=fully_async", "schedule.max_staleness=2", *APART),
    "k_step_off, 2": ("schedule=k_step_off", "schedule.k=2", *APART),
    "fully_async, 4": ("schedule=fully_async", "schedule.max_staleness=4", *APART),
}
NO_LAG = ("colocate_sync", "separated_sync")
CORRECTIONS = {"none": "no correction", "clip": "clipping", "tis": "truncated importance sampling"}
_BLUE, _ORANGE, _GREEN, _RED, _PINK, *_, _CYAN = COLORBLIND
COLORS = dict(zip(SCHEDULES, ["0.65", "0.1", _BLUE, _ORANGE, _GREEN, _RED, _PINK, _CYAN], strict=True))
LAST = 10  # iterations that the second table averages over
SMOOTH = 7  # iterations of the running mean in the figure


@dataclass(frozen=True)
class Run:
    """One schedule under one correction with one seed."""

    schedule: str
    correction: str
    seed: int
    more: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its cell."""
        return f"{self.schedule}, {self.correction}"

    @property
    def settings(self) -> tuple[str, ...]:
        return (*COMMON, *SCHEDULES[self.schedule], f"algorithm.correction={self.correction}", *self.more)

    @cached_property
    def config(self) -> JobConfig:
        return compose_job(self.settings)

    @cached_property
    def folder(self) -> Path:
        return run_directory(self.config, self.seed, RESULTS).path

    @cached_property
    def metrics(self) -> pd.DataFrame:
        return pd.DataFrame(load_metrics(self.folder))

    @cached_property
    def final(self) -> float:
        """Sampled exact match of the final weights on held-out problems."""
        return asyncio.run(held_out_exact_match(self.config, self.folder / MODEL))

    @cached_property
    def last(self) -> float:
        """Exact match of the samples trained in the last iterations."""
        return float(self.metrics["reward/exact_match"].tail(LAST).mean())

    @cached_property
    def lag(self) -> float:
        """Mean over the trained samples of the mean lag of their tokens."""
        samples = load_samples(self.folder).to_pandas()
        return float(samples.loc[samples["fate"] == "trained", "lag_mean"].mean())


def wanted_cells(schedules: Sequence[str], seeds: Sequence[int], more: tuple[str, ...]) -> Iterator[list[Run]]:
    """Runs that differ in the seed only, so that an early end leaves the first seed of everything."""
    for some in filter(None, (seeds[:1], seeds[1:])):
        for correction in CORRECTIONS:
            for schedule in schedules:
                if some == seeds[:1] or correction != "tis" or schedule not in NO_LAG:
                    yield [Run(schedule, correction, seed, more) for seed in some]


def run_all(cells: Sequence[list[Run]]) -> None:
    """Every run that is not done, one after another, each in a process of its own."""
    machine, console = this_machine(), Console()
    with ForkedRuns() as forked:
        for seeds, some in groupby(cells, key=lambda runs: tuple(run.seed for run in runs)):
            laid_out = tuple(resolve_cell(CellRequest(runs[0].name, runs[0].settings), machine) for runs in some)
            print_failures(run_cells(Runs(laid_out, seeds, RESULTS), console, forked.start).failed, console)


def markdown(runs: Sequence[Run], value: Callable[[Run], float]) -> str:
    """A row per schedule: measured mean lag, then for each correction the mean over seeds and every seed."""
    lines = [
        "| schedule | mean lag | " + " | ".join(CORRECTIONS.values()) + " |",
        "|---|---:|" + "---|" * len(CORRECTIONS),
    ]
    for schedule in SCHEDULES:
        own = [run for run in runs if run.schedule == schedule]
        lags = sorted({f"{run.lag:.2f}" for run in own})
        spread = lags[0] if len(lags) == 1 else f"{lags[0]} to {lags[-1]}" if lags else "-"
        cells = [_cell([value(run) for run in _shown(runs, schedule, correction)]) for correction in CORRECTIONS]
        lines.append(f"| `{schedule}` | {spread} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(runs: Sequence[Run], schedule: str, correction: str) -> list[Run]:
    """Runs of a cell; where `tis` is `clip` bit for bit, those of `clip`, which has all seeds."""
    made = "clip" if schedule in NO_LAG and correction == "tis" else correction
    return [run for run in runs if (run.schedule, run.correction) == (schedule, made)]


def _cell(values: Sequence[float]) -> str:
    seeds = " ".join(_share(value) for value in values)
    return f"**{_share(sum(values) / len(values))}** ({seeds})" if values else "not run"


def _share(value: float) -> str:
    return f"{value:.3f}".lstrip("0")


def draw(figure: Figure, runs: Sequence[Run]) -> None:
    """A panel per correction, a colour per schedule. Thin: a seed; thick: the mean of the seeds."""
    figure.set_size_inches(13, 5.6)
    panels = figure.subplots(1, len(CORRECTIONS), sharey=True)
    for panel, (correction, title) in zip(panels, CORRECTIONS.items(), strict=True):
        for schedule in SCHEDULES:
            _draw_curves(panel, schedule, _shown(runs, schedule, correction))
        panel.set(title=title, xlabel="samples trained", xlim=(0, None), ylim=(0, 1))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panels[0].set_ylabel(f"exact match, mean of {SMOOTH} iterations")
    lines = [Line2D([], [], color=color, linewidth=2.2, linestyle=_style(name)) for name, color in COLORS.items()]
    figure.legend(lines, list(COLORS), loc="outside lower center", ncols=len(COLORS) // 2)


def _draw_curves(panel: Axes, schedule: str, runs: Sequence[Run]) -> None:
    curves = [run.metrics.set_index("samples")["reward/exact_match"].rolling(SMOOTH).mean() for run in runs]
    for curve in curves:
        panel.plot(curve.index, curve, color=COLORS[schedule], linewidth=0.7, alpha=0.35)
    if curves:
        mean = pd.concat(curves, axis=1).mean(axis=1, skipna=False)
        panel.plot(mean.index, mean, color=COLORS[schedule], linewidth=2.2, linestyle=_style(schedule))


def _style(schedule: str) -> str:
    """Dashed is what lies upon another curve, bit for bit: those of colocate_sync and one_step_off."""
    return "--" if schedule in ("separated_sync", "delayed_update") else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draw-only", action="store_true", help="run nothing, show what is done")
    parser.add_argument("settings", nargs="*", help="more settings of every run, such as iterations=150")
    given = parser.parse_intermixed_args()
    cells = list(wanted_cells(given.schedules, given.seeds, tuple(given.settings)))
    if not given.draw_only:
        run_all(cells)
    wanted = [run for cell in cells for run in cell]
    done = [run for run in wanted if is_done(run.folder)]
    print(f"\n{len(done)} of {len(wanted)} runs; mean over seeds, and every seed")
    print(f"\nFinal weights, held-out problems:\n\n{markdown(done, lambda run: run.final)}")
    print(f"\nSamples trained in the last {LAST} iterations:\n\n{markdown(done, lambda run: run.last)}")
    path = save_figure(RESULTS / "convergence.png", "tiny · reverse · measured", lambda figure: draw(figure, done))
    print(f"\n{path}")


if __name__ == "__main__":
    main()
