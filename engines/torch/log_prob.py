"""Scores sampled tokens: the engine behind the reference and actor_fwd roles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from engines.loading import ModelWeights
from engines.torch.scoring import TokenScorer
from harness.config import Layout
from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


class TorchLogProb:
    """`harness.protocols.LogProbEngine` on a transformers model in this process."""

    def __init__(
        self, model: Qwen3ForCausalLM, *, temperature: float, device: torch.device, layout: Layout = "padded"
    ) -> None:
        self._model = model.to(device).eval()
        self._scorer = TokenScorer(self._model, temperature, layout)
        self._weights = ModelWeights(model, "log-prob engine")
        self.version = 0

    async def log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """As the protocol says."""
        with torch.inference_mode():  # no decorator: on a coroutine it would end before the body begins
            log_probs = self._scorer(prompts, responses).log_probs
        return Ragged(log_probs.cpu().numpy(), responses.lengths)

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError as `ModelWeights.load`. Whatever is raised, it goes on with the weights that it had."""
        self._weights.load(version, weights)
        self.version = version
