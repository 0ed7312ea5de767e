"""How long responses are, and how long a batch of them takes to generate: for many draws at once."""

from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from harness.config import CostConfig
from harness.cost_model.cost import DecodeCost
from harness.prediction.priors import Draws


def capped_mean(mean: Draws, sigma: Draws, cap: float) -> Draws:
    """E[min(X, cap)] of a log-normal X of this mean: m F(z - s) + cap (1 - F(z)), with m = E[X], s = sigma,
    z = (ln(cap / m) + s^2 / 2) / s and F the normal distribution function (Johnson, Kotz and Balakrishnan, "Continuous
    univariate distributions", volume 1, chapter 14). float64 [n] each."""
    z = _z(mean, sigma, cap)
    below: Draws = mean * ndtr(z - sigma) + cap * (1 - ndtr(z))
    return below


def uncapped_mean(mean: Draws, sigma: Draws, cap: float) -> Draws:
    """Means of log-normals whose means *under* the cap are these: by bisection of the logarithm. float64 [n]."""
    low, high = np.log(mean), np.log(mean) + 12.0 + sigma**2
    for _ in range(50):
        middle = (low + high) / 2
        over = capped_mean(np.exp(middle), sigma, cap) > mean
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    made: Draws = np.exp(high)
    return made


def clipped_share(mean: Draws, sigma: Draws, cap: float) -> Draws:
    """Share of the log-normals of these means that reach the cap."""
    share: Draws = 1 - ndtr(_z(mean, sigma, cap))
    return share


def clipped_tail(mean: Draws, share: float, cap: float) -> Draws:
    """Sigma of the log-normals of which this share reaches the cap, and whose means *under* it are these: by bisection,
    as that mean falls from the cap to its share of it as sigma grows; where it is less, the largest."""
    z = float(ndtri(1 - share))
    low, high = np.full_like(mean, 1e-3), np.full_like(mean, 10.0)
    for _ in range(50):
        sigma = (low + high) / 2
        over = cap * (np.exp(sigma**2 / 2 - sigma * z) * ndtr(z - sigma) + share) > mean
        low, high = np.where(over, sigma, low), np.where(over, high, sigma)
    made: Draws = high
    return made


def longest(mean: Draws, sigma: Draws, cap: float, samples: int) -> Draws:
    """Median of the longest of so many samples."""
    most: Draws = np.exp(np.log(mean) - sigma**2 / 2 + sigma * ndtri(0.5 ** (1 / samples)))
    return np.minimum(most, cap)


def _z(mean: Draws, sigma: Draws, cap: float) -> Draws:
    z: Draws = (np.log(cap / mean) + sigma**2 / 2) / sigma
    return z


def batch_seconds(cost: CostConfig, lengths: NDArray[np.int64], *, engines: int, slots: int) -> float:
    """Seconds until all responses are there: int64 lengths [samples], dealt out to engines in equal runs.

    As `engines.simulated.decoding` has it, but where its KV cache is full: instead of preempting, an engine then runs
    as many samples as the cache holds in the mean. Slots are filled as they become free, so that after the i-th of N
    finishes n = min(slots, N - i) run, and the contexts of all steps add up to the sum over samples of r p + r^2 / 2,
    of r tokens to a prompt of p (`DecodeCost` says how long a step lasts)."""
    decode, prompt = DecodeCost.of(cost), cost.prompt_tokens
    if decode.kv_tokens is not None:
        slots = max(1, min(slots, int(decode.kv_tokens / (prompt + lengths.mean()))))
    most, over = divmod(len(lengths), engines)
    dealt = [lengths[: over * (most + 1)].reshape(over, most + 1), lengths[over * (most + 1) :].reshape(-1, most)]
    return max(_engines_s(decode, part, prompt, slots) for part in dealt if part.size)


def _engines_s(decode: DecodeCost, lengths: NDArray[np.int64], prompt: int, slots: int) -> float:
    """Seconds of the last of several engines: int64 lengths [engines, samples]."""
    count = lengths.shape[1]
    ends = lengths if count <= slots else np.stack([_ends(row, slots) for row in lengths])
    steps = np.diff(np.sort(ends, axis=1), prepend=0, axis=1)
    running = np.minimum(slots, count - np.arange(count))
    weights = np.array([decode.weights(n) for n in running.tolist()])
    contexts = (lengths * prompt + lengths.astype(float) ** 2 / 2).sum(axis=1)
    busy = steps @ (decode.step_s + np.maximum(weights, running * decode.per_sample_s))
    return float((busy + decode.per_cached_s * contexts).max()) + count * decode.prefill(prompt)


def _ends(lengths: NDArray[np.int64], slots: int) -> NDArray[np.int64]:
    """Step at which each sample is done, where one begins when another ends."""
    free = lengths[:slots].tolist()
    ends = list(free)
    heapify(free)
    for length in lengths[slots:].tolist():
        ends.append(free[0] + length)
        heapreplace(free, ends[-1])
    return np.array(ends)
