"""Log-probabilities of tokens from logits, in float32, without a float32 copy of all of them.

Where there are hidden states, `harness.rl.head_log_probs` does without the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 24
"""How many logits are upcast at a time (64 MiB in float32); a row is never split."""


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature) at the tokens: [B, T, V], int64 [B, T] -> float32 [B, T], differentiable.

    logits[b, t] are those that predict tokens[b, t]. temperature (> 0) is the one the tokens were sampled with: then
    these are log-probabilities of the distribution that was drawn from, as long as top-p is 1.
    Autograd keeps the logits it was given and one float per row; the softmax is recomputed in the backward pass.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}; train at the temperature that samples")
    return TokenLogProbs.apply(logits, tokens, temperature)


class TokenLogProbs(torch.autograd.Function):
    """d log p(token) / d logits = (onehot(token) - softmax(logits / temperature)) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        rows, columns = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1, 1)
        normalisers = rows.new_empty(len(rows), dtype=torch.float32)
        for chunk in chunks(rows):
            normalisers[chunk] = torch.logsumexp(rows[chunk].float() / temperature, dim=-1)
        ctx.save_for_backward(logits, tokens, normalisers)
        ctx.temperature = temperature
        return (rows.gather(1, columns).squeeze(1).float() / temperature - normalisers).view(tokens.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, tokens, normalisers = ctx.saved_tensors
        rows, columns = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1, 1)
        scale = (grad.reshape(-1, 1) / ctx.temperature).float()
        grad_rows = torch.empty_like(rows)
        for chunk in chunks(rows):
            softmax = torch.exp(rows[chunk].float() / ctx.temperature - normalisers[chunk].unsqueeze(1))
            softmax.mul_(-scale[chunk])
            grad_rows[chunk] = softmax.scatter_add_(1, columns[chunk], scale[chunk]).to(rows.dtype)
        return grad_rows.view(logits.shape), None, None


def chunks(rows: torch.Tensor) -> Iterator[slice]:
    """Slices of rows [N, V] that hold at most CHUNK_ELEMENTS elements each, and at least one row."""
    step = max(1, CHUNK_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), step):
        yield slice(start, start + step)
