"""Scores sampled tokens: the engine behind the reference and actor_fwd roles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from engines.loading import ModelWeights
from engines.padding import pad_batch
from harness.rl.log_probs import token_log_probs
from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


class TorchLogProb:
    """`harness.protocols.LogProbEngine` on a transformers model in this process."""

    def __init__(self, model: Qwen3ForCausalLM, *, temperature: float, device: torch.device) -> None:
        self._model = model.to(device).eval()
        self._temperature, self._device = temperature, device
        self._weights = ModelWeights(model, "log-prob engine")
        self.version = 0

    async def log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """As the protocol says. Raises RuntimeError after a load that broke off, until a complete one."""
        self._weights.require_complete()
        with torch.inference_mode():  # no decorator: on a coroutine it would end before the body begins
            batch = pad_batch(prompts, responses, self._device)
            logits = self._model(input_ids=batch.inputs, use_cache=False).logits
            return batch.gather(token_log_probs(logits, batch.targets, self._temperature))

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError as `ModelWeights.load`."""
        self._weights.load(version, weights)
        self.version = version
