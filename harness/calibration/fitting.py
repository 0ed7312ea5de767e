"""Costs from timings: least squares in which no cost is below nothing, how well each phase is explained, and the
file of settings, `cost=results/costs/mine.yaml`, whose comments say so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from scipy.optimize import nnls

from harness.config import CostConfig
from harness.metrics.atomic_files import write_text

_OUTLIER = 2.0  # times what was fitted
_DOUBTFUL = 0.3  # of a cost: a larger standard error
_WIDE = 118


@dataclass(frozen=True)
class Fit:
    """A least-squares fit. costs: of a unit of each kind, float64 [k]; timings: how many were fitted; left_out: how
    many were not, as the machine was disturbed; error: median of |fitted / measured - 1|, over all; doubtful: bool [k],
    costs whose standard error is more than three tenths of them, as their units always came with others: only the sum
    is known well."""

    costs: np.ndarray
    timings: int
    left_out: int
    error: float
    doubtful: np.ndarray


@dataclass(frozen=True)
class Phase:
    """The fit of one kind of work. costs: names of `CostConfig` that are numbers; timings: what they were fitted to, in
    words; error: median of |fitted / measured - 1|, None where a median was taken and nothing fitted; note: what to
    mind."""

    name: str
    costs: tuple[str, ...]
    timings: str
    error: float | None = None
    note: str = ""

    @classmethod
    def of(cls, name: str, costs: tuple[str, ...], found: Fit, of_what: str) -> Phase:
        """The phase of a fit; of_what: the noun that follows the number of timings."""
        left_out = f", {found.left_out} left out that took more than twice as long" if found.left_out else ""
        doubtful = [cost for cost, is_doubtful in zip(costs, found.doubtful, strict=False) if is_doubtful]
        note = f"not separable from the rest: {', '.join(doubtful)}" if doubtful else ""
        return cls(name, costs, f"{found.timings} {of_what}{left_out}", found.error, note)


@dataclass(frozen=True)
class FittedCosts:
    """Costs, and where they come from. unseen: what was kept from other costs, called `base`, as nothing showed it."""

    cost: CostConfig
    phases: tuple[Phase, ...]
    unseen: tuple[str, ...]
    base: str

    def values(self, names: Iterable[str]) -> list[str]:
        """`name 0.00123` of each."""
        return [f"{name} {getattr(self.cost, name):.3g}" for name in names]


def fit(seconds: np.ndarray, amounts: np.ndarray, weights: np.ndarray | None = None) -> Fit:
    """Fit seconds [n], all above 0, by amounts [n, k] of k kinds of units: least squares under costs >= 0, each
    residual times its weight ([n]; all 1 by default). Raises ValueError where there is nothing to fit."""
    return _fit(seconds, amounts, np.ones(len(seconds), bool), weights)


def fit_undisturbed(seconds: np.ndarray, amounts: np.ndarray) -> Fit:
    """Fit as `fit` does, on a machine with other work: a second fit leaves out what took twice as long as fitted."""
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
    """The costs >= 0 of least squares, [k]. Units are scaled first: costs differ by many powers of ten."""
    scale = np.maximum(np.linalg.norm(amounts, axis=0), np.finfo(float).tiny)
    costs: np.ndarray = nnls(amounts / scale, seconds)[0] / scale
    return costs


def _standard_errors(seconds: np.ndarray, amounts: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Standard error of each cost, by least squares without a bound; units that never came cost nothing, for sure."""
    came = np.linalg.norm(amounts, axis=0) > 0
    scale = np.linalg.norm(amounts[:, came], axis=0)
    left = max(1, len(seconds) - int(came.sum()))
    variance = float(((amounts @ costs - seconds) ** 2).sum()) / left
    inverse = np.linalg.pinv((amounts[:, came] / scale).T @ (amounts[:, came] / scale), hermitian=True)
    errors = np.zeros(len(costs))
    errors[came] = np.sqrt(variance * np.diag(inverse)) / scale
    return errors


def write_costs(folder: Path, fitted: FittedCosts, about: Sequence[str]) -> Path:
    """Write the file, named as the costs are, and return its path. about: what was measured, a comment each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{fitted.cost.name}.yaml"
    lines = [*about, *explained(fitted)]
    comments = [f"# {part}" for line in lines for part in wrap(line, _WIDE, subsequent_indent="  ")]
    write_text(path, "\n".join([*comments, *_settings(asdict(fitted.cost))]) + "\n")
    return path


def explained(fitted: FittedCosts) -> list[str]:
    """Sentences on the fit: for each phase what was fitted, to what, and how well; last what was not."""
    unseen = f"Not seen, and as in cost={fitted.base}: {', '.join(fitted.unseen)}."
    return [*(_phase(fitted, phase) for phase in fitted.phases), unseen]


def _phase(fitted: FittedCosts, phase: Phase) -> str:
    parts = [phase.timings]
    if phase.error is not None:
        parts.append(f"median error {phase.error:.1%}")
    if phase.note:
        parts.append(phase.note)
    return f"{phase.name}: {'; '.join([*filter(None, [', '.join(fitted.values(phase.costs))]), *parts])}."


def _settings(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _settings(value, indent + "  ")
        else:
            yield f"{indent}{name}: {json.dumps(float(f'{value:.6g}') if isinstance(value, float) else value)}"
