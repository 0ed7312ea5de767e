"""Log-probabilities of sampled tokens under a frozen policy (reference) or a recent one (actor_fwd)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from harness.protocols import LogProbEngine, Span
from harness.transfer_queue import Batch, Column, Ragged
from harness.weight_sync.endpoints import ReceivingWorker
from harness.workers.stage import Stage


class ReferenceStage(Stage):
    """The initial policy, for the KL of the trained one to it."""

    role = kind = "reference"

    def __init__(self, engine: LogProbEngine, **stage: Any) -> None:
        super().__init__(**stage)
        self.engine = engine

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        return {"ref_log_probs": await self.engine.log_probs(*prompts_and_responses(batch))}


class OldLogProbStage(Stage, ReceivingWorker):
    """The trainer's own arithmetic at the newest version it has seen: what the engine's log-probs are held against.

    `old_version` says which version that was, so that only tokens sampled by the same one are compared.
    """

    role, kind = "actor_fwd", "old_log_prob"

    def __init__(self, engine: LogProbEngine, device: torch.device, **stage: Any) -> None:
        super().__init__(**stage)
        self.engine, self.device = engine, device
        self._engine_is_free = asyncio.Lock()  # on a simulated clock, calls come in while the engine computes

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        async with self._engine_is_free:
            log_probs = await self.engine.log_probs(*prompts_and_responses(batch))
            return {"old_log_probs": log_probs, "old_version": np.full(len(batch.rows), self.version, np.int32)}

    async def _load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Span]:
        """Between two micro-batches, never inside one."""
        with self.waits("load", f"the weights of version {version}"):
            async with self._engine_is_free:
                start = self.clock.now()
                await self.engine.load_weights(version, weights)
                self.version = version
                return [Span(self.role, self.name, "load_weights", start, self.clock.now(), version, version - 1)]


def prompts_and_responses(batch: Batch) -> tuple[Ragged, Ragged]:
    """The two columns that scoring reads."""
    prompts, responses = batch.columns["prompt"], batch.columns["response"]
    assert isinstance(prompts, Ragged) and isinstance(responses, Ragged)
    return prompts, responses
