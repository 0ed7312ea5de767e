"""Diagnostics of a training step, as sums that add up over micro-batches, ranks and passes; among them how far the
policy in training is from the one that sampled.

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

import math

import torch

from harness.rl.kl import k3
from harness.rl.losses.ratios import MAX_LOG_RATIO, log_ratio, policy_ratio

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


_EPS = 1e-4
"""Weights that are closer than this, relatively, are the same."""


@torch.no_grad()
def diagnostics(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropies: torch.Tensor | None = None,
    reference_log_probs: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    same_version: torch.Tensor | None = None,
    gradients: torch.Tensor | None = None,
    unbounded: torch.Tensor | None = None,
) -> dict[str, float]:
    """Sums, counts and maxima of one micro-batch: inputs [B, T] (mask and same_version bool), outputs numbers.

    `clipped` counts the tokens at which PPO's clip cuts the gradient off, whichever correction is in use. `mismatch`
    is k3 between the engine that sampled (behaviour) and the trainer's recomputation (old_log_probs), over the tokens
    where same_version says that both used the same weights: what remains is arithmetic. gradients: of the policy loss
    by each log-prob; `left_out` counts the tokens with an advantage that have none. unbounded: the weights that the
    correction bounds; `cut` counts the tokens whose gradient has another weight, and has one. Absent inputs leave their
    keys out. A rank without tokens reports zeros.
    """
    ratio = policy_ratio(log_probs, behaviour_log_probs, mask)
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, (advantages < 0) & (ratio < 1 - clip_low)) & mask
    sums = {"tokens": mask.sum(), "clipped": clipped.sum(), "ratio_max": ratio.masked_fill(~mask, 0.0).amax()}
    if entropies is not None:
        sums["entropy"] = entropies.masked_fill(~mask, 0.0).sum(dtype=torch.float64)
    if reference_log_probs is not None:
        sums["kl_ref"] = k3(log_probs, reference_log_probs, mask).sum(dtype=torch.float64)
    if old_log_probs is not None and same_version is not None:
        comparable = mask & same_version
        sums["mismatch"] = k3(behaviour_log_probs, old_log_probs, comparable).sum(dtype=torch.float64)
        sums["mismatch_tokens"] = comparable.sum()
    if gradients is not None:
        learning = mask & (advantages != 0)
        sums["left_out"] = (learning & (gradients == 0)).sum()
        if unbounded is not None:
            off = (gradients + unbounded * advantages).abs() > _EPS * (unbounded * advantages).abs()
            sums["cut"] = (learning & (gradients != 0) & off).sum()
    return {key: float(value) for key, value in sums.items()} | off_policy_sums(log_probs, behaviour_log_probs, mask)


def add_diagnostics(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Two micro-batches' or two ranks' diagnostics as one: keys in `*_max` take the larger, others the sum.

    `{}` is the neutral element.
    """
    merged = dict(one)
    for key, value in other.items():
        if key not in merged:
            merged[key] = value
        elif key.endswith("_max"):
            merged[key] = max(merged[key], value)
        else:
            merged[key] = merged[key] + value
    return merged


def policy_metrics(sums: dict[str, float]) -> dict[str, float]:
    """The `policy/*` metrics of everything added up; means are over tokens, KL and entropy in nats.

    Where the actor adds them, `scored` and `scored_lag` are samples with recomputed log-probs and the iterations by
    which these are behind the trainer's weights; `kl_samples` and `kl_coef` samples whose rewards are less their KL,
    and its coefficients.
    """
    metrics = {
        "policy/clip_fraction": sums["clipped"] / max(1.0, sums["tokens"]),
        "policy/ratio_max": sums["ratio_max"],
    }
    metrics |= {f"policy/{name}": value for name, value in off_policy_metrics(sums, sums["tokens"]).items()}
    for key in ("entropy", "kl_ref", "left_out", "cut", "rejected"):
        if key in sums:
            metrics[f"policy/{key}"] = sums[key] / max(1.0, sums["tokens"])
    if sums.get("mismatch_tokens"):
        metrics["policy/mismatch_kl"] = sums["mismatch"] / sums["mismatch_tokens"]
    if sums.get("scored"):
        metrics["policy/proximal_lag"] = sums["scored_lag"] / sums["scored"]
    if sums.get("kl_samples"):
        metrics["policy/kl_coef"] = sums["kl_coef"] / sums["kl_samples"]
    return metrics | router_metrics(sums)


ROUTED = "routed_"
"""Begins the names of sums that count the tokens of an expert: `routed_<layer>_<expert>`."""


def router_metrics(sums: dict[str, float]) -> dict[str, float]:
    """The `router/*` metrics of everything added up; nothing where no layer has experts."""
    layers: dict[str, list[float]] = {}
    for key, value in sums.items():
        if key.startswith(ROUTED):
            layers.setdefault(key.split("_")[1], []).append(value)
    if not layers:
        return {}
    loads = [max(counts) * len(counts) / sum(counts) for counts in layers.values()]
    metrics = {"router/load_max": sum(loads) / len(loads), "router/entropy": sums["router_entropy"] / sums["routings"]}
    return metrics | ({"router/rerouted": sums["rerouted"] / sums["replayed"]} if sums.get("replayed") else {})
