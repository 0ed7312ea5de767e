"""Along one run: running means, where lines first reach something, rates after warm-up, drift."""

from __future__ import annotations

import math

import numpy as np


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """float64 [n]: at each point the mean of the last `window` values, NaN until there are as many."""
    values = np.asarray(values, dtype=np.float64)
    if not 1 <= window <= values.size:
        raise ValueError(f"a window of {window} does not fit {values.size} values")
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    return np.concatenate([np.full(window - 1, math.nan), means])


def crossing(x: np.ndarray, y: np.ndarray, threshold: float) -> float:
    """The first x at which the straight lines between the points (x, y) are at the threshold or above; infinite where
    they never are."""
    there = np.flatnonzero(np.asarray(y) >= threshold - 1e-12)  # rounding in a share
    if not there.size:
        return math.inf
    first = int(there[0])
    if not first:
        return float(x[0])
    low, high = y[first - 1], y[first]
    return float(x[first - 1] + (x[first] - x[first - 1]) * min(1.0, (threshold - low) / (high - low)))


def steady_rate(seconds: np.ndarray, amounts: np.ndarray, warmup: int) -> float:
    """The amount per second after the first `warmup` iterations; over all of them if there are no more than those.

    seconds: float64 [n], when each iteration ended on a clock that began at 0; amounts: [n], what each made.
    """
    start = warmup if has_steady_part(len(seconds), warmup) else 0
    since = float(seconds[start - 1]) if start else 0.0
    return float(np.sum(amounts[start:])) / (float(seconds[-1]) - since)


def has_steady_part(iterations: int, warmup: int) -> bool:
    """Whether anything is left when warm-up iterations are left out."""
    return iterations > warmup


def drift(durations: np.ndarray, warmup: int) -> float:
    """Median of the last third of the iterations after warm-up over that of the first third; 1 for fewer than nine.

    Medians, so that a single slow iteration is no drift.
    """
    steady = np.asarray(durations, dtype=np.float64)[warmup:]
    third = steady.size // 3
    return float(np.median(steady[-third:]) / np.median(steady[:third])) if third >= 3 else 1.0
