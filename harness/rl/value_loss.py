"""The critic's loss, token by token, and what its training says of itself."""

from collections.abc import Mapping

import torch


def value_losses(
    predictions: torch.Tensor, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float | None
) -> torch.Tensor:
    """max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2, float32 [R]; 0 where mask is False.

    V: predictions, in which it is differentiable; V_old: values, by the critic that advantages were made with; R:
    returns. PPO's clip for values, as in its authors' code (Engstrom et al., arXiv 2005.12729, section 2); clip None is
    the plain squared error.
    """
    predictions, values, returns = (part.masked_fill(~mask, 0.0) for part in (predictions, values, returns))
    errors = (predictions - returns).square()
    if clip is not None:
        near = torch.clamp(predictions, values - clip, values + clip)
        errors = torch.maximum(errors, (near - returns).square())
    return 0.5 * errors


@torch.no_grad()
def value_sums(
    predictions: torch.Tensor, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float | None
) -> dict[str, float]:
    """Sums over sampled tokens, which add up over micro-batches and ranks. `clipped`: tokens whose clipped error is the
    larger one, and so has no gradient."""
    losses = value_losses(predictions, values, returns, mask, clip=clip)
    plain = value_losses(predictions, values, returns, mask, clip=None)
    values, returns = values[mask].double(), returns[mask].double()
    sums = {
        "tokens": mask.sum(),
        "loss": losses.sum(dtype=torch.float64),
        "clipped": (losses > plain).sum(),
        "values": values.sum(),
        "returns": returns.sum(),
        "returns_squared": returns.square().sum(),
        "errors": (returns - values).sum(),
        "errors_squared": (returns - values).square().sum(),
    }
    return {name: float(value) for name, value in sums.items()}


def value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The `critic/*` metrics of everything added up. Means are over sampled tokens; `explained_variance` is 1 less the
    variance of returns - values over that of returns, of the values that advantages were made with; it is left out
    where all returns are alike. `lag`: iterations by which the critic that wrote the values is behind the one trained,
    of samples; all that simulated ones have.
    """
    if not sums:
        return {}
    metrics = {"critic/lag": sums["lag"] / sums["samples"], "critic/lag_max": sums["lag_max"]}
    if not sums.get("tokens"):
        return metrics
    means = {name: value / sums["tokens"] for name, value in sums.items()}
    metrics |= {
        "critic/loss": means["loss"],
        "critic/clip_fraction": means["clipped"],
        "critic/value_mean": means["values"],
        "critic/return_mean": means["returns"],
    }
    spread = means["returns_squared"] - means["returns"] ** 2
    if spread > _ALIKE:
        missed = means["errors_squared"] - means["errors"] ** 2
        metrics["critic/explained_variance"] = 1.0 - missed / spread
    return metrics


_ALIKE = 1e-12
"""A variance below this is rounding."""
