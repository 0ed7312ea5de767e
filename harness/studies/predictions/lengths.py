"""Response lengths of a given mean and tail, under a cap."""

from __future__ import annotations

import math
from statistics import NormalDist

from harness.config import LengthsConfig

_NORMAL = NormalDist()


def capped_mean(mean: float, sigma: float, cap: int) -> float:
    """E[min(X, cap)] of a log-normal X of this mean: m F(z - s) + cap (1 - F(z)), with m = E[X], s = sigma,
    z = (ln(cap / m) + s^2 / 2) / s and F the normal distribution function (Johnson, Kotz and Balakrishnan, "Continuous
    univariate distributions", volume 1, chapter 14)."""
    if sigma == 0:
        return min(mean, float(cap))
    z = (math.log(cap / mean) + sigma**2 / 2) / sigma
    return mean * _NORMAL.cdf(z - sigma) + cap * (1 - _NORMAL.cdf(z))


def lognormal(mean: float, sigma: float, cap: int, common: float = 0.0) -> LengthsConfig:
    """A log-normal whose mean *under* the cap is `mean`. Raises ValueError where no mean before the cap gives it."""
    if not 1 <= mean < cap:
        raise ValueError(f"no responses of at most {cap} tokens have a mean of {mean:g}")
    low, high = mean, mean
    while capped_mean(high, sigma, cap) < mean:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if capped_mean(middle, sigma, cap) < mean else (low, middle)
    return LengthsConfig(kind="lognormal", mean=high, sigma=sigma, common=common, cap=cap)
