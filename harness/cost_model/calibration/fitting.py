"""Costs from timings: least squares in which no cost is below nothing, and how well each phase is explained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from harness.config import CostConfig

_OUTLIER = 2.0  # times what was fitted
_DOUBTFUL = 0.3  # of a cost: a larger standard error


@dataclass(frozen=True)
class Fit:
    """costs: of a unit of each kind, float64 [k]; timings: how many were fitted; left_out: how many were not, as the
    machine was disturbed; error: median of |fitted / measured - 1|, over all; doubtful: bool [k], costs whose standard
    error is more than three tenths of them, as their units always came with others: only the sum is known well."""

    costs: np.ndarray
    timings: int
    left_out: int
    error: float
    doubtful: np.ndarray


def fit(seconds: np.ndarray, amounts: np.ndarray, weights: np.ndarray | None = None) -> Fit:
    """Fit seconds [n], all above 0, by amounts [n, k] of k kinds of units: least squares under costs >= 0, each
    residual times its weight ([n]; all 1 by default). Raises ValueError where there is nothing to fit."""
    return _fit(seconds, amounts, np.ones(len(seconds), bool), weights)


def fit_undisturbed(seconds: np.ndarray, amounts: np.ndarray) -> Fit:
    """As `fit`, of a machine with other work: what took more than twice as long as fitted is left out of a second
    fit."""
    first = fit(seconds, amounts)
    kept = seconds <= _OUTLIER * (amounts @ first.costs)
    return _fit(seconds, amounts, kept, None) if kept.any() else first


def _fit(seconds: np.ndarray, amounts: np.ndarray, kept: np.ndarray, weights: np.ndarray | None) -> Fit:
    if not len(seconds):
        raise ValueError("no timings to fit costs to")
    scale = (np.ones(len(seconds)) if weights is None else weights)[kept]
    seen, units = seconds[kept] * scale, amounts[kept] * scale[:, None]
    costs = not_negative(seen, units)
    return Fit(
        costs=costs,
        timings=int(kept.sum()),
        left_out=int((~kept).sum()),
        error=relative_error(amounts @ costs, seconds),
        doubtful=_standard_errors(seen, units, costs) > _DOUBTFUL * costs,
    )


def relative_error(fitted: np.ndarray, measured: np.ndarray) -> float:
    """Median of |fitted / measured - 1|."""
    return float(np.median(np.abs(fitted / measured - 1)))


def not_negative(seconds: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """The costs >= 0 of least squares, [k], exactly: the best of all choices of costs that are not zero. For few."""
    kinds = amounts.shape[1]
    scale = np.maximum(np.linalg.norm(amounts, axis=0), np.finfo(float).tiny)
    scaled = amounts / scale
    best, least = np.zeros(kinds), float(seconds @ seconds)
    for count in range(1, kinds + 1):
        for used in map(list, combinations(range(kinds), count)):
            found = np.linalg.lstsq(scaled[:, used], seconds, rcond=None)[0]
            squares = float(((scaled[:, used] @ found - seconds) ** 2).sum())
            if (found >= 0).all() and squares < least:
                best, least = np.zeros(kinds), squares
                best[used] = found / scale[used]
    return best


def _standard_errors(seconds: np.ndarray, amounts: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Of each cost, as of least squares without a bound; units that never came cost nothing, for sure."""
    came = np.linalg.norm(amounts, axis=0) > 0
    scale = np.linalg.norm(amounts[:, came], axis=0)
    left = max(1, len(seconds) - int(came.sum()))
    variance = float(((amounts @ costs - seconds) ** 2).sum()) / left
    inverse = np.linalg.pinv((amounts[:, came] / scale).T @ (amounts[:, came] / scale), hermitian=True)
    errors = np.zeros(len(costs))
    errors[came] = np.sqrt(variance * np.diag(inverse)) / scale
    return errors


@dataclass(frozen=True)
class Phase:
    """What was fitted of one kind of work. costs: names of `CostConfig`; timings: what they were fitted to, in words;
    error: median of |fitted / measured - 1|, None where a median was taken and nothing fitted; note: what to mind."""

    name: str
    costs: tuple[str, ...]
    timings: str
    error: float | None = None
    note: str = ""

    @classmethod
    def of(cls, name: str, costs: tuple[str, ...], found: Fit, of_what: str) -> Phase:
        left_out = f", {found.left_out} left out that took more than twice as long" if found.left_out else ""
        doubtful = [cost for cost, is_doubtful in zip(costs, found.doubtful, strict=False) if is_doubtful]
        note = f"not told apart from the rest: {', '.join(doubtful)}" if doubtful else ""
        return cls(name, costs, f"{found.timings} {of_what}{left_out}", found.error, note)


@dataclass(frozen=True)
class Fitted:
    """Costs, and where they come from. unseen: what was kept from other costs, called `base`, as nothing showed it."""

    cost: CostConfig
    phases: tuple[Phase, ...]
    unseen: tuple[str, ...]
    base: str

    def values(self, names: Iterable[str]) -> list[str]:
        """`name 0.00123` of each."""
        return [f"{name} {getattr(self.cost, name):.3g}" for name in names]
