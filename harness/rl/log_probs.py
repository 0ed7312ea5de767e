"""Log-probabilities of tokens in float32, from hidden states.

A vocabulary of 150 thousand makes the logits of a micro-batch the largest tensor by far. `head_log_probs` applies the
output layer to a few rows at a time, forward and again backward, so that no more than so many bytes of logits exist at
once. Their gradients wait, in the dtype of the model, for one product with each of the other two matrices: adding to a
gradient as large as the vocabulary costs the same however many rows it is of (`harness.cost_model.training_memory`).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness.config import TrainingConfig
from harness.cost_model.training_memory import HeadRows

LOGIT_BYTES = TrainingConfig.logit_bytes
"""Bytes of float32 logits at a time, where nobody says otherwise."""


def head_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    float32: bool = False,
    logit_bytes: int = LOGIT_BYTES,
    gradient_squares: bool = False,
) -> tuple[torch.Tensor, ...]:
    """log softmax(hidden weight^T / temperature) at the tokens, and the entropy of each row in nats: two float32 [N].

    hidden [N, H] and weight [V, H] are of one dtype, in which logits are computed, or in float32 where that is asked;
    tokens int64 [N]. Softmax and sums are float32. Both are differentiable in hidden and weight.

    group: its ranks hold V rows of the vocabulary each, in the order of ranks, and the same hidden and tokens; all get
    the same numbers. logit_bytes: of float32 logits that exist at a time.

    gradient_squares: then, from the same pass, a third one: for each log-probability the square of its gradient by the
    logits over the temperature, not differentiable: |onehot - p|^2 = 1 - 2 p(token) + sum of p^2. Summed as it stands,
    so that of a token of probability near 1 something is left.
    """
    found = HeadLogProbs.apply(hidden, weight, tokens, temperature, group, float32, logit_bytes, gradient_squares)
    return found if gradient_squares else found[:2]


class HeadLogProbs(torch.autograd.Function):
    """d log p(token) / d logits = (onehot(token) - p) / temperature and d entropy / d logits = -p (log p + entropy) /
    temperature, p = softmax(logits / temperature)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        float32: bool,
        logit_bytes: int,
        with_squares: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and entropies, float32, and squares where asked for."""
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {temperature}; train at the temperature that samples")
        multiply = logits_in_float32 if float32 else _logits
        rows = len(hidden)
        squares = hidden.new_empty(rows, dtype=torch.float32) if with_squares else None
        log_probs, entropies, normalisers = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(3))
        place, here = _places(tokens, len(weight), group)
        at_once = HeadRows(len(weight), weight.shape[1], hidden.itemsize, logit_bytes)
        for chunk in _slices(0, rows, at_once.chunk):
            logits = multiply(hidden[chunk], weight).div_(temperature)
            normaliser = _normaliser(logits, group)
            chosen = logits.gather(1, place[chunk]).squeeze(1).where(here[chunk], 0.0)
            log_probs[chunk] = _summed(chosen, group) - normaliser
            normalisers[chunk] = normaliser
            entropies[chunk] = _summed(_surprise(logits.sub_(normaliser.unsqueeze(1))), group)
            if squares is not None:
                squares[chunk] = _summed(_gradient_squares(logits, place[chunk], here[chunk]), group)
        ctx.save_for_backward(hidden, weight, place, here, normalisers, entropies)
        ctx.temperature, ctx.group, ctx.multiply, ctx.at_once = temperature, group, multiply, at_once
        ctx.set_materialize_grads(False)  # entropies that only are read cost nothing
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return log_probs, entropies, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_entropies: torch.Tensor | None, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients by hidden states and matrix, in chunks of rows."""
        hidden, weight, _, _, normalisers, _ = ctx.saved_tensors
        grad = torch.zeros_like(normalisers) if grad is None else grad
        scale = (grad / ctx.temperature).float().unsqueeze(1)
        grad_hidden, trained = torch.empty_like(hidden), ctx.needs_input_grad[1]
        of_product = ctx.at_once.product(len(hidden))
        # What several products add up is kept in float32; the sum inside of one is the matrix product's own.
        several = trained and len(hidden) > of_product
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if several else None
        for rows in _slices(0, len(hidden), of_product):
            grad_logits = _logit_gradients(ctx, rows, scale, grad_entropies)
            grad_hidden[rows] = grad_logits @ weight
            part = grad_logits.T @ hidden[rows] if trained else None
            del grad_logits  # or the next ones would be made beside them
            grad_weight = part if grad_weight is None or part is None else grad_weight.add_(part)
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return _summed(grad_hidden, ctx.group), of_weight, *[None] * 6


def _logit_gradients(ctx: Any, rows: slice, scale: torch.Tensor, grad_entropies: torch.Tensor | None) -> torch.Tensor:
    """Gradients by the logits of these rows in the dtype of the hidden states: [n, V], made chunk by chunk."""
    hidden, weight, *_ = ctx.saved_tensors
    if rows.stop - rows.start <= ctx.at_once.chunk:
        return _chunk_gradient(ctx, rows, scale, grad_entropies)
    made = hidden.new_empty(rows.stop - rows.start, len(weight))
    for chunk in _slices(rows.start, rows.stop, ctx.at_once.chunk):
        of_chunk = _chunk_gradient(ctx, chunk, scale, grad_entropies)
        made[chunk.start - rows.start : chunk.stop - rows.start] = of_chunk
    return made


def _chunk_gradient(ctx: Any, chunk: slice, scale: torch.Tensor, grad_entropies: torch.Tensor | None) -> torch.Tensor:
    """The same of one chunk, whose logits are computed again."""
    hidden, weight, place, here, normalisers, entropies = ctx.saved_tensors
    logits = ctx.multiply(hidden[chunk], weight).div_(ctx.temperature)
    logits.sub_(normalisers[chunk].unsqueeze(1))
    of_entropy = None
    if grad_entropies is not None:
        of_entropy = _entropy_gradient(logits, entropies[chunk], grad_entropies[chunk] / ctx.temperature)
    softmax = logits.exp_().mul_(-scale[chunk])
    softmax.scatter_add_(1, place[chunk], scale[chunk] * here[chunk].unsqueeze(1))
    return (softmax if of_entropy is None else softmax.add_(of_entropy)).to(hidden.dtype)


def logits_in_float32(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Products of half-precision numbers are exact in float32: what is left out is the rounding of each logit, which
    moves log-probabilities by up to .09. [N, H], [V, H] -> float32 [N, V]."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden.float() @ weight.float().T


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T).float()


def _places(tokens: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The place [N, 1] of each token in this rank's part of the vocabulary, and whether it is there at all [N]."""
    place = tokens if group is None else tokens - dist.get_rank(group) * size
    return place.clamp(0, size - 1).unsqueeze(1), (place >= 0) & (place < size)


def _normaliser(logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """log of the sum of exp of each row, over the parts of all ranks: [n, V] -> [n]."""
    own = torch.logsumexp(logits, dim=-1)
    if group is None:
        return own
    largest = own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest + _summed((own - largest).exp(), group).log()


def _summed(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum over all ranks, in place."""
    if group is not None:
        dist.all_reduce(part, group=group)
    return part


def _surprise(log_probs: torch.Tensor) -> torch.Tensor:
    """Each row's part of the entropy: [n, V] -> [n]. 0 * -inf counts as 0."""
    return -(log_probs.exp() * log_probs).nan_to_num_(0.0).sum(dim=-1)


def _gradient_squares(log_probs: torch.Tensor, place: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """Each row's part of |onehot - p|^2: [n, V], [n, 1], [n] -> [n]. Overwrites log_probs."""
    chosen = here.unsqueeze(1).to(log_probs.dtype)
    return log_probs.exp_().scatter_add_(1, place, -chosen).square_().sum(dim=-1)


def _entropy_gradient(log_probs: torch.Tensor, entropies: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """-p (log p + entropy) times `grad` of each row: [n, V], [n], [n] -> [n, V]. 0 * -inf counts as 0."""
    surprise = (log_probs.exp() * (log_probs + entropies.unsqueeze(1))).nan_to_num_(0.0)
    return surprise.mul_(-grad.unsqueeze(1))


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """[start, stop) in pieces of `size`, the last one as it is left."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
