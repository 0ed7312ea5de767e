"""How often intervals of few runs hold the truth, by simulation: figures of docs/statistics.md.

    python -m tests.benchmarks.bench_intervals [--repeats 20000]

Bootstraps are repeated a tenth as often.
"""

import argparse
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from scipy import stats

from harness.comparison.statistics import holm, iqm_interval, pair_share_bounds, t_bounds
from harness.comparison.verdict import collapsed, odd_ones

SEEDS = (2, 3, 4, 5, 10)
DRAWS = 1_000

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
DISTRIBUTIONS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, shape: rng.standard_normal(shape), 0.0),
    "uniform": (lambda rng, shape: rng.uniform(-1, 1, shape), 0.0),
    "heavy tails (t, 3)": (lambda rng, shape: rng.standard_t(3, shape), 0.0),
    "one in ten five times as wide": (
        lambda rng, shape: rng.standard_normal(shape) * np.where(rng.random(shape) < 0.1, 5.0, 1.0),
        0.0,
    ),
    "skewed (lognormal, 0.5)": (lambda rng, shape: rng.lognormal(0, 0.5, shape), math.exp(0.125)),
    "very skewed (exponential)": (lambda rng, shape: rng.exponential(1.0, shape), 1.0),
    "one in ten collapses, by 20": (
        lambda rng, shape: rng.standard_normal(shape) - 20.0 * (rng.random(shape) < 0.1),
        -2.0,
    ),
}
ACCURACIES = ((0.9, 0.03), (0.6, 0.05), (0.3, 0.05), (0.15, 0.03))
"""Means and standard deviations over seeds, of two cells in which nothing collapses."""


def percentile(values: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap of the mean, values [repeats, n]."""
    drawn = _resampled(values, rng).mean(axis=-1)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=1)
    return low, high


def studentized(values: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Studentized bootstrap of the mean; draws without any scatter are left out."""
    drawn = _resampled(values, rng)
    mean, error = values.mean(axis=1), values.std(axis=1, ddof=1) / math.sqrt(values.shape[1])
    scatter = drawn.std(axis=-1, ddof=1) / math.sqrt(values.shape[1])
    scatter[scatter < 1e-12] = math.nan
    low, high = np.nanquantile((drawn.mean(axis=-1) - mean[:, None]) / scatter, [0.025, 0.975], axis=1)
    return mean - high * error, mean - low * error


def _resampled(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    repeats, count = values.shape
    chosen = rng.integers(0, count, (repeats, DRAWS, count))
    return values[np.arange(repeats)[:, None, None], chosen]


def means(repeats: int) -> None:
    """Coverage of the mean by t, percentile and studentized bootstrap."""
    print("| distribution | " + " | ".join(f"{n} seeds" for n in SEEDS) + " |")
    for name, (draw, truth) in DISTRIBUTIONS.items():
        cells = []
        for count in SEEDS:
            rng = np.random.default_rng(count)
            values = draw(rng, (repeats, count))
            _, low, high = t_bounds(values)
            rates = [_rate(low, high, truth)]
            for method in (percentile, studentized) if count > 2 else (percentile,):
                rates.append(_rate(*method(values[: repeats // 10], rng), truth))
            cells.append(" / ".join(f"{rate:.3f}" for rate in rates))
        print(f"| {name} | " + " | ".join(cells) + " |")


def pairs(repeats: int) -> None:
    """Coverage of the paired difference of two such cells, whose true value is 0."""
    print("\n| paired difference of two cells | " + " | ".join(f"{n} seeds" for n in SEEDS) + " |")
    for name, (draw, _) in DISTRIBUTIONS.items():
        rates = []
        for count in SEEDS:
            rng = np.random.default_rng(count)
            _, low, high = t_bounds(draw(rng, (repeats, count)) - draw(rng, (repeats, count)))
            rates.append(_rate(low, high, 0.0))
        print(f"| {name} | " + " | ".join(f"{rate:.3f}" for rate in rates) + " |")


def alarms(repeats: int) -> None:
    """How often the warning of collapsed or outlying seeds is given: where nothing collapses, and where a seed of the
    first of two cells did."""
    counts = SEEDS[1:]
    print("\n| accuracy over seeds | " + " | ".join(f"{n} seeds" for n in counts) + " |")
    for mean, spread in ACCURACIES:
        cells = []
        for count in counts:
            rng = np.random.default_rng(count)
            drawn = rng.normal(mean, spread, (repeats, 2, count)).clip(0.0, 1.0)
            false = np.mean([_alarm(both) for both in drawn])
            drawn[:, 0, 0] = rng.uniform(0.0, mean / 3, repeats)
            cells.append(f"{false:.4f} / {np.mean([_alarm(both) for both in drawn]):.3f}")
        print(f"| {mean:g} +- {spread:g} | " + " | ".join(cells) + " |")


def _alarm(cells: np.ndarray) -> bool:
    best = float(cells.max())
    some = [0 < int(collapsed(cell, best).sum()) < cell.size for cell in cells]
    return any(some) or any(odd_ones(cell) for cell in cells)


def interquartile(repeats: int) -> None:
    """Coverage of the bootstrapped IQM of normal scores, whose true value is 0."""
    print("\n| strata | 5 seeds | 10 seeds | 20 seeds |")
    for strata in (1, 5):
        rates = []
        for count in (5, 10, 20):
            rng = np.random.default_rng(count)
            found = [iqm_interval(rng.standard_normal((strata, count)), draws=DRAWS) for _ in range(repeats)]
            rates.append(float(np.mean([not its.excludes(0.0) for its in found])))
        print(f"| {strata} | " + " | ".join(f"{rate:.3f}" for rate in rates) + " |")


def improvement(repeats: int) -> None:
    """Coverage of the probability of improvement: Newcombe's interval / percentile bootstrap."""
    print("\n| truth | 3 and 3 seeds | 5 and 5 | 10 and 10 |")
    for truth in (0.5, 0.7, 0.9, 0.98):
        cells = []
        for count in (3, 5, 10):
            rng = np.random.default_rng(count)
            shift = NormalDist().inv_cdf(truth) * math.sqrt(2)
            values = shift + rng.standard_normal((repeats, count))
            baseline = rng.standard_normal((repeats, count))
            low, high = pair_share_bounds(_wins(values, baseline), count, count)
            picks = [rng.integers(0, count, (repeats, 400, count)) for _ in range(2)]
            rows = np.arange(repeats)[:, None, None]
            drawn = _wins(values[rows, picks[0]], baseline[rows, picks[1]])
            boot = np.quantile(drawn, [0.025, 0.975], axis=1)
            cells.append(f"{_rate(low, high, truth):.3f} / {_rate(boot[0], boot[1], truth):.3f}")
        print(f"| {truth} | " + " | ".join(cells) + " |")


def families(repeats: int) -> None:
    """How often anything is called different where nothing is: cells that share a baseline."""
    print("\n| cells besides the baseline | each by itself | Holm |")
    for others in (1, 3, 7):
        rng = np.random.default_rng(others)
        wrong = np.zeros(2)
        for _ in range(repeats):
            cells = rng.standard_normal((others + 1, 5)) + rng.standard_normal(5)  # what a seed does to all
            pairs = cells[1:] - cells[0]
            p = stats.ttest_1samp(pairs, 0.0, axis=1).pvalue
            wrong += np.array([min(p) < 0.05, min(holm(p)) < 0.05])
        print(f"| {others} | {wrong[0] / repeats:.3f} | {wrong[1] / repeats:.3f} |")


def _wins(values: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    return (values[..., :, None] > baseline[..., None, :]).mean(axis=(-2, -1))


def _rate(low: np.ndarray, high: np.ndarray, truth: float) -> float:
    return float(np.mean((low <= truth) & (truth <= high)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20_000)
    repeats = parser.parse_args().repeats
    means(repeats)
    pairs(repeats)
    alarms(repeats // 10)
    interquartile(repeats // 10)
    improvement(repeats // 10)
    families(repeats // 10)


if __name__ == "__main__":
    main()
