"""Bytes of a rollout engine on each of its devices: weights, KV cache, and what a step needs."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import EngineConfig, ModelConfig
from harness.cost_model.shape import bytes_per_number, kv_bytes_per_token, served_bytes

PREFILL_TOKENS = 8192
"""Most tokens of a prefill pass (engines/torch/kv_slots.py; vLLM's default is the same)."""

DRAW_BYTES = 20
"""Bytes for each logit of a decode step: float32 logits, log-probabilities and probabilities, and their sum in float64
(engines/torch/sampling.py)."""


def key_length(tokens: int) -> int:
    """Tokens that the slot of a sample of so many tokens holds: as engines/torch/kv_slots.py, which loads torch."""
    step = 16 if tokens <= 256 else 256
    return -(-tokens // step) * step


def is_fp8(engine: EngineConfig) -> bool:
    """Whether the engine's matrices have 8 bits."""
    return engine.options.get("quantization") == "fp8"


@dataclass(frozen=True)
class EngineMemory:
    """The memory of a rollout engine. longest: tokens of a sample. paged: the cache is of whatever memory is left, and
    holds one sample at least; else it has room for every slot at full length."""

    model: ModelConfig
    engine: EngineConfig
    longest: int
    paged: bool = False

    @property
    def weights(self) -> float:
        """Bytes of weights on each device."""
        return served_bytes(self.model, is_fp8(self.engine)) / self.engine.tensor_parallel

    @property
    def token(self) -> float:
        """Keys and values of one token. Heads are divided over an engine's devices; more devices than heads hold some
        of them twice."""
        return kv_bytes_per_token(self.model) / min(self.engine.tensor_parallel, self.model.kv_heads)

    @property
    def kv_cache(self) -> float:
        """Bytes of the least KV cache on each device: all slots of the embedded engine, one sample of others."""
        slots = 1 if self.paged or self.engine.name != "torch" else self.engine.slots
        return slots * key_length(self.longest) * self.token

    @property
    def work(self) -> float:
        """Bytes of a step's tensors: a layer's widest moment in prefill; in decoding, drawing a token for each slot."""
        model = self.model
        networks = model.active_experts if model.experts else 1
        tokens = min(PREFILL_TOKENS, self.engine.slots * self.longest)
        prefill = tokens * bytes_per_number(model) * (3 * model.ff * networks + 4 * model.hidden)
        return max(prefill / self.engine.tensor_parallel, self.engine.slots * model.vocabulary * DRAW_BYTES)
