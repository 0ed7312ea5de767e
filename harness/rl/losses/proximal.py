"""A proximal policy that nobody has to compute."""

from __future__ import annotations

import torch


def log_linear(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, lags: torch.Tensor) -> torch.Tensor:
    """log mu / (lag + 1) + log pi lag / (lag + 1), as a constant to the gradient: the proximal policy, between the one
    that sampled a token and the one in training, by how many of the versions in between were made before the batch.

    log_probs, behaviour_log_probs: float32 [R]; lags: int [R], versions from mu to the batch's first step, so that its
    own steps are one more. Where the lag is 0 it is mu, and then the weight of `decoupled` is 1. A-3PO
    (arXiv 2512.06547), as AReaL's `loglinear` has it.
    """
    share = lags / (lags + 1)
    return behaviour_log_probs + share * (log_probs.detach() - behaviour_log_probs)
