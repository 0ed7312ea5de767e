"""What the page draws as curves: a metric of every cell against samples, tokens or seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.comparison.result import Comparison
from harness.report.page.palette import DASHES, of_cell

AXES = {"samples": "samples trained", "tokens": "tokens trained (prompt and response)", "seconds": "time (s)"}
TITLES = {
    "reward/exact_match": "exact match",
    "reward/mean": "mean reward",
    "response_length/mean": "response length (tokens)",
    "throughput/samples_per_s": "samples per second",
    "staleness/mean": "mean lag (iterations)",
}
REWARDS = ("reward/exact_match", "reward/mean")
_FIGURES = 5  # significant, more than any screen shows


def curves_data(comparison: Comparison) -> dict[str, Any]:
    """Every curve as plain JSON values; what is not finite is null. `keys` and `axes` are those there are, in the order
    in which people want them."""
    axes = dict(AXES)
    if comparison.simulated:
        axes["seconds"] = "simulated time (s)"
    present = {curve.key for curve in comparison.curves}
    keys = [key for key in TITLES if key in present] + sorted(present - TITLES.keys())
    return {
        "simulated": comparison.simulated,
        "axes": [[axis, title] for axis, title in axes.items() if any(c.axis == axis for c in comparison.curves)],
        "keys": [[key, TITLES.get(key, key)] for key in keys],
        "cells": [
            {"label": cell.label, "colour": of_cell(number), "dash": DASHES[number % len(DASHES)]}
            for number, cell in enumerate(comparison.cells)
        ],
        "curves": [
            {
                "cell": curve.cell,
                "key": curve.key,
                "axis": curve.axis,
                "window": curve.window,
                "grid": plain(curve.grid),
                "mean": plain(curve.mean),
                "low": plain(curve.low),
                "high": plain(curve.high),
                "seeds": [[seed, plain(values)] for seed, values in curve.per_seed.items()],
            }
            for curve in comparison.curves
        ],
    }


def plain(values: np.ndarray) -> list[float | None]:
    """Rounded to some digits, null for what is not finite."""
    return [float(f"{value:.{_FIGURES}g}") if np.isfinite(value) else None for value in values.tolist()]
