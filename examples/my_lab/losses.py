"""A loss of your own: algorithm.correction=my_lab.losses:cispo algorithm.options.high=3 (docs/plugins.md)."""

import torch


def cispo(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    high: float = 2.0,
) -> torch.Tensor:
    """-min(ratio, high) A log pi, the weight detached (MiniMax-M1, arXiv 2506.13585), without a lower clip."""
    ratio = (log_probs - behaviour_log_probs).detach().masked_fill(~mask, 0.0).exp()
    return -ratio.clamp(max=high) * advantages * log_probs
