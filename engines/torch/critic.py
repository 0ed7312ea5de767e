"""The critic: the policy's model with a head of one number instead of the output layer, trained as the policy is.

The head begins at 0, so that the first advantages are the rewards; what is below it begins as the policy does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from engines.torch.first_weights import FirstWeights, Outline, Part
from engines.torch.fsdp import TrainedModel, scored
from engines.torch.scoring import VALUE_HEAD, ValueScorer
from harness.config import AlgorithmConfig, TrainingConfig
from harness.protocols import ValueBatch
from harness.rl.value_loss import value_losses, value_sums
from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FSDPCritic(TrainedModel[ValueScorer, ValueBatch]):
    """`harness.protocols.CriticEngine`, of an outline by `value_model`. algorithm: at the critic's learning rate."""

    async def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Values of all response tokens: float32. May be called between any two calls of this engine."""
        scorer = self._scorer
        (values,) = scored(scorer, scorer.at_tokens, prompts, responses, self._training, self._most, self._pipeline)
        return values

    def _around(
        self,
        model: PreTrainedModel,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        group: dist.ProcessGroup | None,
    ) -> ValueScorer:
        return ValueScorer(model, training)

    def _loss(self, found: tuple[torch.Tensor], batch: ValueBatch) -> tuple[torch.Tensor, dict[str, float]]:
        clip, rows = self._algorithm.value_clip, self._there(batch.responses.lengths)
        (predictions,) = found
        old, returns, mask = (self._there(column.values) for column in (batch.values, batch.returns, batch.mask))
        losses = value_losses(predictions, old, returns, mask, clip=clip)
        return self._aggregated(losses, mask, rows), value_sums(predictions.detach(), old, returns, mask, clip=clip)


def value_model(outline: Outline) -> Outline:
    """A model of values, made of the outline of a policy, which it takes over."""
    model = outline.model
    del model.lm_head
    dtype = next(model.parameters()).dtype
    setattr(model, VALUE_HEAD, torch.nn.Linear(model.config.hidden_size, 1, dtype=dtype, device="meta"))
    return replace(outline, weights=_WithHead(outline.weights))


class _WithHead:
    """A policy's first weights, and those of a value head: 0."""

    def __init__(self, weights: FirstWeights) -> None:
        self._weights = weights

    def parts(self, wanted: Mapping[str, Part]) -> Iterator[tuple[str, torch.Tensor]]:
        below = {name: part for name, part in wanted.items() if not name.startswith(f"{VALUE_HEAD}.")}
        for name in wanted.keys() - below.keys():
            yield name, torch.zeros([part.stop - part.start for part in wanted[name]])
        yield from self._weights.parts(below)
