"""Sentences and names that the page and its Markdown twin share."""

from __future__ import annotations

import numpy as np

from harness.comparison.parts import Cell, StalenessHistogram
from harness.comparison.result import Comparison
from harness.metrics.manifest import HOW_TIMED
from harness.report.page.curves_data import REWARDS
from harness.report.page.numbers import figure, plural
from harness.report.page.svg import grouped, short

RESULTS = (
    "Means over seeds, 95 % intervals below them, and what each cell is against the baseline, paired by seed. A "
    "difference is called one only where its interval excludes none and Holm's correction for several cells does too."
)
CURVES = (
    "Thick: mean over seeds; band: 95 % interval of the mean at each point by itself, from three seeds on; thin: every "
    "seed. Curves end where the first of a cell's seeds ends. Their ends stand in numbers under “Every measure”."
)

PROFILES = (
    "For every score, the share of a cell's seeds that end above it; the band is Wilson's 95 % interval at each score "
    "by itself, the grey line the baseline. Further to the right is better; where lines cross, neither always is."
)
MATRIX = (
    "Bold: mean over seeds; in brackets its 95 % interval; then every seed. *: its difference to the baseline, paired "
    "by seed, is called one."
)


class Words:
    """What the page calls the comparison."""

    def __init__(self, comparison: Comparison) -> None:
        first = comparison.cells[0].runs[0]
        identity, config = first.identity, first.config
        self.how = "simulated" if comparison.simulated else identity.backend
        self.how_word = HOW_TIMED[identity.backend]
        what = " or ".join(axis.replace("_", " ") for axis in comparison.axes)
        cells = comparison.cells
        names = ", ".join(cell.label for cell in cells)
        self.on = f"{identity.model}, task {config['task']['name']}"
        self.heading = f"Which {what}? {plural(len(cells), 'cell')} on {self.on}"
        if len(cells) == 1:
            self.heading = f"{cells[0].label} on {self.on}"
        self.title = f"{names} · {identity.model} · {self.how_word}"
        self.curves_title = "Reward" if any(c.key in REWARDS for c in comparison.curves) else "Response length"
        seeds = sorted({seed for cell in cells for seed in cell.seeds})
        devices = "simulated devices" if comparison.simulated else "devices"
        self.facts = {
            "experiment": identity.experiment,
            "seeds": ", ".join(map(str, seeds)),
            "iterations": f"{len(first.metrics):,}",
            "samples per run": f"{first.metrics[-1]['samples']:,}",
            devices: f"{config['cluster']['devices']:,}",
            "engine": "simulated" if identity.backend != "real" else identity.engine,
            "times are": self.how_word,
        }
        if len(cells) > 1:
            self.facts["baseline"] = cells[comparison.baseline].label


def measures_caption(comparison: Comparison) -> str:
    """How to read the tables of measures."""
    told = "Dots are seeds, the band is the 95 % interval of their mean (the line)."
    if len(comparison.cells) > 1:
        base = comparison.cells[comparison.baseline].label
        told += (
            f" “Against the baseline” is the mean ratio to, or difference from, {base}, paired by seed, with its "
            "interval. P(better) is the probability that a run is better than one of the baseline."
        )
    return told


def histogram_told(staleness: StalenessHistogram) -> str:
    """The histogram in words."""
    shares, names = grouped(staleness)
    told = ", ".join(f"lag {name}: {short(share)}" for share, name in zip(shares, names, strict=True) if share > 0)
    return f"Share of trained samples by worst lag: {told}"


def lag_told(cell: Cell) -> str:
    """Where the lag grew, and what was dropped for it."""
    flight, queue = (_over_iterations(cell, f"staleness/{part}_mean") for part in ("in_flight", "in_queue"))
    dropped = sum(run.ledger["dropped_stale"] for run in cell.runs)
    admitted = sum(run.ledger["admitted"] for run in cell.runs)
    lost = f"{dropped:,} of {admitted:,} samples dropped as stale" if dropped else "no sample dropped as stale"
    if flight + queue == 0:
        return f"No sample has any lag; {lost}."
    return (
        f"Mean worst lag {figure(flight + queue, 2)} iterations: {figure(flight, 2)} grew in flight, "
        f"{figure(queue, 2)} in the queue; {lost}."
    )


def _over_iterations(cell: Cell, key: str) -> float:
    return float(np.mean([iteration[key] for run in cell.runs for iteration in run.metrics]))
