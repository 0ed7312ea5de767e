"""Pipeline parallelism: the layers of a model cut into stages, each on ranks of its own, through which parts of a
micro-batch pass one behind the other.

One forward, one backward (PipeDream-Flush, arXiv 2006.09503, section 2.2): a stage computes as many parts ahead as
stages come after it, and then each part's backward before the next one's forward, so that none keeps more parts than
that. Every stage has the whole micro-batch and knows the shape of each part: parts may differ, and none is filled up.
Gradients add up in the order of the parts, as they do without stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape = tuple[int, int]
"""Rows and tokens of a part, as they are laid out."""

Output = TypeVar("Output", torch.Tensor, torch.Tensor | None)
Forward = Callable[[int, torch.Tensor | None], Output]
"""(number of the part, hidden states [rows, tokens, H] of the stage before; None on the first stage) -> hidden states,
or of the last stage what its caller asks for."""

Value = TypeVar("Value")


class Elsewhere(torch.nn.Module):
    """A layer that another stage has: passes on what it gets."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return hidden states as they are: [rows, tokens, H]."""
        return hidden


def cut_stage(model: PreTrainedModel, number: int, stages: int) -> None:
    """Keep this stage's part of `model`, in place: its share of the layers, whose number `stages` divides; of the first
    one the embeddings, of the last one the norm and the head. Parameters keep their names. A head that shares its
    weight with the embeddings has a copy of them on the last stage."""
    decoder: Any = model.base_model
    layers = decoder.layers
    own = range(number * len(layers) // stages, (number + 1) * len(layers) // stages)
    for place in range(len(layers)):
        if place not in own:
            layers[place] = Elsewhere()
    if number < stages - 1:
        decoder.norm = Elsewhere()
        for name, module in list(model.named_children()):
            if module is not decoder:
                setattr(model, name, Elsewhere())
    if number and not (number == stages - 1 and name_of_shared(model)):
        decoder.embed_tokens = Elsewhere()


def name_of_shared(model: PreTrainedModel) -> str | None:
    """The name of the parameter that is the weight of the embeddings and of the head; None where these are two."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return None
    return next(name for name, parameter in model.named_parameters() if parameter is head.weight)


class Pipeline:
    """The place of this rank among the stages. group: of the ranks that have one stage each, in order; None: there is
    one. width: numbers of a hidden state; dtype: that they travel in."""

    def __init__(self, group: dist.ProcessGroup | None, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._width, self._dtype, self._device = group, width, dtype, device
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.number, self.stages = 0 if group is None else dist.get_rank(group), len(ranks)
        self._before = None if self.is_first else ranks[self.number - 1]
        self._after = None if self.is_last else ranks[self.number + 1]
        self._ends = ranks[0], ranks[-1]

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embeddings."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.number == self.stages - 1

    def train(self, shapes: Sequence[Shape], forward: Forward[torch.Tensor]) -> None:
        """Forward and backward of parts of these shapes. `forward` of the last stage returns a scalar."""
        waiting = deque[tuple[torch.Tensor | None, torch.Tensor]]()
        ahead = min(self.stages - self.number - 1, len(shapes))

        def compute(part: int, received: torch.Tensor | None) -> torch.Tensor:
            if received is not None:
                received.requires_grad_()
            waiting.append((received, forward(part, received)))
            return waiting[-1][1].detach()

        def back_propagate(gradient: torch.Tensor | None) -> torch.Tensor | None:
            received, output = waiting.popleft()
            output.backward(gradient)
            return None if received is None else received.grad

        for part in range(ahead):
            self._exchange(self._after, compute(part, self._receive(self._before, shapes[part])))
        received = self._receive(self._before, shapes[ahead]) if ahead < len(shapes) else None
        for part in range(len(shapes) - ahead):
            output = compute(part + ahead, received)
            gradient = back_propagate(self._exchange(self._after, output, shapes[part]))
            following = shapes[part + ahead + 1] if part + ahead + 1 < len(shapes) else None
            received = self._exchange(self._before, gradient, following)
        for part in range(len(shapes) - ahead, len(shapes)):
            self._exchange(self._before, back_propagate(self._receive(self._after, shapes[part])))

    def compute(
        self, shapes: Sequence[Shape], forward: Callable[[int, torch.Tensor | None], torch.Tensor | None]
    ) -> None:
        """Forward alone. What the last stage returns goes nowhere."""
        for part, shape in enumerate(shapes):
            self._exchange(self._after, forward(part, self._receive(self._before, shape)))

    def from_last(self, value: Value) -> Value:
        """The value that the last stage calls this with."""
        if self._group is None:
            return value
        shared = [value]
        dist.broadcast_object_list(shared, src=self._ends[1], group=self._group, device=self._device)
        return shared[0]

    def from_all(self, value: Value) -> list[Value]:
        """Values that the stages call this with, in their order."""
        found = [value] * self.stages
        if self._group is not None:
            dist.all_gather_object(found, value, group=self._group)
        return found

    def add_of_ends(self, gradient: torch.Tensor) -> None:
        """Add to the gradient of the embeddings, on the first stage, that of the head which has their weight, on the
        last, and there too. Other stages do not call it."""
        other = self._exchange(self._ends[self.is_first], gradient, like=gradient)
        assert other is not None, "the ends of several stages are different ranks"
        gradient.add_(other)

    def sum(self, numbers: torch.Tensor) -> None:
        """Sum over the stages, in place."""
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)

    def _receive(self, peer: int | None, shape: Shape) -> torch.Tensor | None:
        return self._exchange(peer, None, shape)

    def _exchange(
        self,
        peer: int | None,
        sent: torch.Tensor | None,
        expected: Shape | None = None,
        like: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Send and receive at once, so that neighbours who both have something to send need not agree who begins. A
        rank that has no such neighbour, None, does nothing."""
        if peer is None:
            return None
        received = None if like is None else torch.empty_like(like)
        if expected is not None:
            received = torch.empty(*expected, self._width, dtype=self._dtype, device=self._device)
        operations = []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent.contiguous(), peer, self._group))
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, peer, self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received
