"""A job of training with its batch, and the memory that is planned for it."""

from dataclasses import dataclass

import numpy as np

from harness.config import ModelConfig, TrainingConfig
from harness.cost_model.memory_plan import training_peaks
from harness.cost_model.shape import adapter_parameters
from harness.cost_model.training_memory import PassShape, RankMemory
from harness.protocols import TrainBatch
from harness.transfer_queue import Ragged

LOGITS = 1 << 20
"""Bytes of logits at a time, so that a small vocabulary too has several chunks, and several products."""


@dataclass(frozen=True)
class TrainingCase:
    """Training of a model on so many ranks, in one micro-batch of rows that are alike. gpu: as planned for one."""

    world: int
    dtype: str = "bfloat16"
    layout: str = "padded"
    recompute: bool = False
    hidden: int = 256
    ff: int = 768
    layers: int = 6
    vocabulary: int = 512
    architecture: str = "qwen2"
    rows: int = 8
    prompt: int = 16
    response: int = 200
    gpu: bool = False
    lora_rank: int = 0
    experts: int = 0
    spread: int = 1

    @property
    def model(self) -> ModelConfig:
        bare = self.architecture.startswith("qwen3")
        return ModelConfig(
            *("measured", self.hidden, self.layers, 8, 2, self.hidden // 8, self.ff, self.vocabulary, False, 4096),
            dtype=self.dtype,  # type: ignore[arg-type]
            architecture=self.architecture,
            attention_bias="none" if bare else "qkv",
            qk_norm=bare,
            experts=self.experts,
            active_experts=2 if self.experts else 0,
            fp32_head=False,  # on a CPU it widens a whole matrix, which no GPU does
        )

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(
            layout=self.layout,  # type: ignore[arg-type]
            recompute_activations=self.recompute,
            logit_bytes=LOGITS,
            lora_rank=self.lora_rank,
            expert_parallel=self.spread,
        )

    @property
    def batch(self) -> TrainBatch:
        draws = np.random.default_rng(0)
        prompts, responses = (
            Ragged.from_rows([draws.integers(1, self.vocabulary, tokens) for _ in range(self.rows)])
            for tokens in (self.prompt, self.response)
        )
        behaviour = np.full(len(responses.values), -3.4, np.float32)
        versions = np.zeros(len(responses.values), np.int32)
        return TrainBatch(
            prompts=prompts,
            responses=responses,
            behaviour_log_probs=Ragged(behaviour, responses.lengths),
            versions=Ragged(versions, responses.lengths),
            advantages=np.ones(self.rows, np.float32),
            ref_log_probs=None,
            old_log_probs=None,
        )

    @property
    def planned(self) -> dict[str, float]:
        tokens = self.rows * (self.prompt + self.response - 1)
        packed = self.layout == "packed"
        work = PassShape(
            tokens=tokens,
            scored=self.rows * self.response if packed else tokens,
            ranks=self.world,
            recompute=self.recompute,
            repeated_heads=False,
            gpu=self.gpu,
            logit_bytes=LOGITS,
            adapters=adapter_parameters(self.model, self.training),
            expert_ranks=self.spread,
        )
        return training_peaks(RankMemory(self.model, work))
