"""The critic: one rank of a world that says what responses are worth, token by token, and learns it from the returns.

It reads each row twice: prompt and response as they come, to write `values`; and, when advantages have been made of
these, returns, to learn from them. Both are loops of one role, which computes one thing at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.protocols import CriticEngine, ValueBatch
from harness.rl.diagnostics import add_diagnostics
from harness.runtime.runtime import open_ended
from harness.transfer_queue import Batch, Column
from harness.workers.readers import MicroBatchReader
from harness.workers.stages import StageRole, prompts_and_responses
from harness.workers.training import ONE_STEP, RememberingRole, Training, TrainReport, Updates, learnt_tokens


class CriticRole(StageRole, RememberingRole):
    """`reader` gives the rows to learn from, those of the batch that the actor trains on. Values are those of the
    version before the iteration's first step, or of an older one where rows wait: `value_version` says of which."""

    role, kind = "critic", "values"

    def __init__(
        self,
        engine: CriticEngine,
        reader: MicroBatchReader,
        *,
        rank: int,
        mask_truncated: bool = False,
        updates: Updates = ONE_STEP,
        reports: bool = True,
        **stage: Any,
    ) -> None:
        super().__init__(**stage)
        self.engine, self.rank, self.mask_truncated = engine, rank, mask_truncated
        self._training = Training(
            self,
            engine,
            self.clock,
            reader,
            role="critic",
            name=self.name,
            accumulate=self._accumulate,
            noted=self._note_samples,
            updates=updates,
            reports=reports,
        )

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        values = await self.engine.values(*prompts_and_responses(batch))
        return {"values": values, "value_version": np.full(len(batch.rows), self.version, np.int32)}

    @open_ended
    async def train(self, iteration: int) -> TrainReport:
        """Train as `Training.train`."""
        report = await self._training.train(iteration)
        self.version = iteration + 1
        return report

    async def _accumulate(self, batch: Batch, iteration: int) -> tuple[dict[str, float], Sequence[int]]:
        prompts, responses = prompts_and_responses(batch)
        values, returns = batch.ragged("values"), batch.ragged("returns")
        mask = learnt_tokens(batch, self.mask_truncated)
        learnt = ValueBatch(prompts, responses, values, returns, mask)
        return await self.engine.accumulate(learnt), self.engine.rank_tokens(learnt)

    def _note_samples(self, report: TrainReport, batch: Batch, iteration: int) -> None:
        lags = iteration - batch.dense("value_version")
        sums = {"samples": float(len(lags)), "lag": float(lags.sum()), "lag_max": float(lags.max())}
        report.sums = add_diagnostics(report.sums, sums)
