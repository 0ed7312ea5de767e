"""Scores sampled tokens: the engine behind the reference and actor_fwd roles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

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
        self.version = 0
        self._torn: int | None = None

    @torch.inference_mode()
    def log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """As the protocol says. Raises RuntimeError after a load that broke off, until a complete one."""
        if self._torn is not None:
            raise RuntimeError(f"version {self._torn} was loaded in part only; load a complete set of weights")
        batch = pad_batch(prompts, responses, self._device)
        logits = self._model(input_ids=batch.inputs, use_cache=False).logits
        return batch.gather(token_log_probs(logits, batch.targets, self._temperature))

    @torch.no_grad()
    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError where a parameter is unknown, missing or of another shape; the iterable is read to its end
        all the same, so that a collective behind it completes."""
        self._torn = version
        missing = {name for name, _ in self._model.named_parameters()}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        wrong = []
        for name, tensor in weights:
            if name not in parameters or parameters[name].shape != tensor.shape:
                wrong.append(f"no parameter {name} of shape {tuple(tensor.shape)} here")
            else:
                parameters[name].copy_(tensor)
            missing.discard(name)
        wrong += [f"{name} is missing" for name in sorted(missing)]
        if wrong:
            raise ValueError(f"the weights of version {version} do not fit: {'; '.join(wrong)}")
        self.version = version
        self._torn = None
