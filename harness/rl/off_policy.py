"""How far the policy in training is from the one that sampled: sums over tokens that add up over micro-batches, ranks
and passes, and what becomes of them.

With r = pi / mu of each token, and tokens drawn from mu (d = log r):

| metric | mean over tokens of | estimates |
|---|---|---|
| kl_behaviour_k1 | -d | KL(mu, pi), of either sign |
| kl_behaviour | r - 1 - d | the same, never negative: k3 (Schulman, "Approximating KL divergence", 2020) |
| kl_behaviour_reverse | r d - r + 1 | KL(pi, mu), weighed by r; never negative |
| chi_squared | (r - 1)^2 | chi-squared of pi from mu, by which the variance of importance weights grows |

`effective_samples` is (sum r)^2 / (n sum r^2), the share of tokens that would say as much if all weighed the same (Kong
1992). Quantiles of r come from a histogram of d in bins of one hundredth, so they are right to half a percent; beyond
e^-10 and e^10 they are those.
"""

from __future__ import annotations

import math

import torch

from harness.rl.losses.ratios import MAX_LOG_RATIO, log_ratio

_BIN, _BINS = 0.01, 1000  # width, and how many to each side of 0
_PREFIX = "log_ratio_bin_"
_SUMS = ("behaviour_k1", "behaviour_k3", "behaviour_reverse", "chi_squared", "ratios", "ratio_squares")
_QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


def off_policy_sums(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Sums of one micro-batch, over tokens where mask is True: inputs of one shape; sums in float64, and a count for
    each bin that has any token. Ratios are cut off as in the losses."""
    d = log_ratio(log_probs.double(), behaviour_log_probs.double(), mask)[mask].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, over = d.exp(), d.expm1()
    values = (-d, over - d, ratio * d - over, over.square(), ratio, ratio.square())
    bins = (d / _BIN).nan_to_num(nan=_BINS).round().clamp(-_BINS, _BINS).long() + _BINS
    counts = torch.bincount(bins, minlength=2 * _BINS + 1).double()
    told = torch.cat([torch.stack([value.sum() for value in values]), counts]).cpu().numpy()  # one copy
    sums, counted = told[: len(_SUMS)], told[len(_SUMS) :]
    of_bins = {f"{_PREFIX}{place - _BINS}": float(counted[place]) for place in counted.nonzero()[0]}
    return dict(zip(_SUMS, sums.tolist(), strict=True)) | of_bins


def off_policy_metrics(sums: dict[str, float], tokens: float) -> dict[str, float]:
    """Metrics of everything added up; nothing where there is no token."""
    if not tokens:
        return {}
    return {
        "kl_behaviour_k1": sums["behaviour_k1"] / tokens,
        "kl_behaviour": sums["behaviour_k3"] / tokens,
        "kl_behaviour_reverse": sums["behaviour_reverse"] / tokens,
        "chi_squared": sums["chi_squared"] / tokens,
        "effective_samples": sums["ratios"] ** 2 / (tokens * sums["ratio_squares"]),
        **_quantiles(sums, tokens),
    }


def _quantiles(sums: dict[str, float], tokens: float) -> dict[str, float]:
    """The middle of the first bin below or in which lies at least that share of the tokens."""
    counts = sorted((int(key.removeprefix(_PREFIX)), value) for key, value in sums.items() if key.startswith(_PREFIX))
    found = {}
    for name, share in _QUANTILES.items():
        below = 0.0
        for place, count in counts:
            below += count
            if below >= share * tokens:
                found[name] = math.exp(place * _BIN)
                break
    return found
