"""Token draws that are keyed by what is drawn, not by who draws it or when.

The uniform of token `t` of a sample is number `t` of a counter-based generator keyed by (run seed, sample id): Philox
4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The token is the inverse of the cumulative
distribution, in vocabulary order, at that uniform. So a schedule can change the weights that a sample is drawn with,
and never the draw.
"""

from collections.abc import Sequence

import numpy as np
import torch

from harness.protocols import Sampling


def uniforms(seed: int, sample_id: int, count: int) -> np.ndarray:
    """The first `count` uniforms in [0, 1) of one sample: float64 [count]. A longer call begins with a shorter one."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, sample_id], dtype=np.uint64))).random(count)


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, and its log-probability under the distribution that it was drawn from.

    The distribution is softmax(logits / temperature); with top_p < 1 (Holtzman et al., "The curious case of neural text
    degeneration", ICLR 2020) it is restricted to the smallest set of most likely tokens that holds at least top_p, and
    renormalised. Temperature 0 is the argmax: a point mass, log-probability 0.

    Args:
        logits: any float dtype, [rows, vocabulary].
        uniform: float64 [rows], in [0, 1).

    Returns:
        tokens int64 [rows] and log-probabilities float32 [rows].
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(len(tokens), device=logits.device)
    log_probs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        log_probs = _nucleus(log_probs, sampling.top_p)
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    point = uniform[:, None] * cumulative[:, -1:]
    # The first token whose cumulative mass exceeds the point: never one of probability zero.
    tokens = torch.searchsorted(cumulative, point, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def draw_each(
    logits: torch.Tensor, uniform: torch.Tensor, samplings: Sequence[Sampling]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as `draw` does, where each row has a sampling of its own."""
    if len(kinds := dict.fromkeys(samplings)) == 1:
        return draw(logits, uniform, samplings[0])
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(len(samplings), device=logits.device)
    for kind in kinds:
        rows = torch.tensor([row for row, its in enumerate(samplings) if its == kind], device=logits.device)
        tokens[rows], log_probs[rows] = draw(logits[rows], uniform[rows], kind)
    return tokens, log_probs


def _nucleus(log_probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Log-probabilities restricted to the nucleus and renormalised; -inf outside. float32 [rows, vocabulary]."""
    ordered, order = log_probs.exp().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    outside = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(-1, order, before >= top_p)
    return torch.log_softmax(log_probs.masked_fill(outside, -torch.inf), dim=-1)
