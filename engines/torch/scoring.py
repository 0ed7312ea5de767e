"""How likely a model finds tokens that were sampled: the one forward pass behind training and scoring."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from engines.torch.packing import pack_batch, use_packed_attention
from engines.torch.padding import pad_batch
from harness.config import Layout
from harness.rl.log_probs import head_log_probs
from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model


class LaidOut(Protocol):
    """Samples laid out for a forward pass."""

    @property
    def targets(self) -> torch.Tensor:
        """Tokens to score: int64 [N]."""

    def hidden(self, decoder: Qwen3Model) -> torch.Tensor:
        """The last hidden state that predicts each of them: [N, H]."""

    def at_responses(self, values: torch.Tensor) -> torch.Tensor:
        """Of a value per target [N] those of response tokens, sample after sample: [R]."""


LAYOUTS: dict[Layout, Callable[[Ragged, Ragged, torch.device], LaidOut]] = {"padded": pad_batch, "packed": pack_batch}


class Scores(NamedTuple):
    """A value per response token, sample after sample: float32 [R]. Only the log-probabilities are differentiable."""

    log_probs: torch.Tensor
    entropies: torch.Tensor


class TokenScorer(torch.nn.Module):
    """A model that is asked for log-probabilities, never for logits. `group`: the ranks that share the vocabulary."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        temperature: float,
        layout: Layout,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if layout == "packed":
            use_packed_attention(model)
        self.model, self._temperature, self._group = model, temperature, group
        self._lay_out = LAYOUTS[layout]

    def forward(self, prompts: Ragged, responses: Ragged) -> Scores:
        """prompts and responses: int64, of k rows each."""
        weight = self.model.lm_head.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        batch = self._lay_out(prompts, responses, weight.device)
        scores = head_log_probs(batch.hidden(self.model.model), weight, batch.targets, self._temperature, self._group)
        return Scores(*map(batch.at_responses, scores))
