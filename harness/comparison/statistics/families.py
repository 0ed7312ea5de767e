"""Several differences from one baseline: how many may be called without fooling oneself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.comparison.statistics.interval import Difference


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family: calling those below 0.05 errs at all, in any of them, in at most 5 % of families.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979), 65-70.
    """
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return [float(p) for p in adjusted]


def call(differences: Sequence[Difference]) -> list[Difference]:
    """The family with `distinguishable` only where Holm's adjusted p is below 1 - confidence as well: such a
    difference's own interval excludes none, always. Intervals stay those of each by itself."""
    adjusted = holm([difference.p for difference in differences])
    return [
        replace(its, distinguishable=its.distinguishable and p < 1 - its.interval.confidence)
        for its, p in zip(differences, adjusted, strict=True)
    ]
