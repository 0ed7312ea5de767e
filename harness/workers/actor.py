"""The ranks that learn. The actor: one rank of the training world, and the source of new weights. The critic: one of a
world that says what responses are worth, token by token, and learns it from the returns.

The critic reads each row twice: prompt and response as they come, to write `values`; and, when advantages have been
made of these, returns, to learn from them. Both are loops of one role, which computes one thing at a time.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from harness.protocols import Clock, CriticEngine, Span, TrainBatch, TrainEngine, ValueBatch
from harness.rl.diagnostics import add_diagnostics
from harness.runtime.runtime import open_ended
from harness.transfer_queue import Batch, Column, Ragged
from harness.weight_sync.endpoints import SendingWorker
from harness.weight_sync.transports import LocalReceiver
from harness.workers.dataflow import ROUTES, samples_in, texts_of
from harness.workers.dealing import some_rows
from harness.workers.readers import Deadlines, MicroBatchReader
from harness.workers.stages import StageRole, prompts_and_responses
from harness.workers.training import (
    ONE_STEP,
    SCORED_TOKENS,
    LossMask,
    RememberingRole,
    TrainedRows,
    Training,
    TrainReport,
    Updates,
)
from harness.workers.turns import NO_TURNS, ComputingRole, Turns


class ActorRole(ComputingRole, RememberingRole, SendingWorker):
    """One training rank. `reader` knows in which order it takes groups. It computes and publishes in its turn."""

    def __init__(
        self,
        engine: TrainEngine,
        clock: Clock,
        *,
        rank: int,
        reader: MicroBatchReader,
        device: torch.device,
        turns: Turns = NO_TURNS,
        loss_mask: LossMask = SCORED_TOKENS,
        updates: Updates = ONE_STEP,
        baseline_of: int | None = None,
        reports: bool = True,
    ) -> None:
        """loss_mask: what is read, and has no loss; baseline_of: samples of a group, the
        first of which is read, and not trained; None: all are. reports: see `Training`."""
        super().__init__(f"actor[{rank}]", turns)
        self.loss_mask, self.baseline_of = loss_mask, baseline_of
        self.engine, self.clock = engine, clock
        self.rank, self.name, self.device = rank, str(rank), device
        self.version = 0  # of the engine's parameters, as they are now
        self._training = Training(
            self,
            engine,
            clock,
            reader,
            role="actor",
            name=self.name,
            accumulate=self._accumulate,
            noted=self._note_samples,
            updates=updates,
            begins_step=self._begin_step,
            reports=reports,
        )
        self._settled = asyncio.Event()  # set unless steps of a batch were made, but not all
        self._settled.set()
        self._open = asyncio.Event()  # set while there are such steps, and rows of the batch may be to come

    @open_ended
    async def train(self, iteration: int, first: Deadlines = ()) -> TrainReport:
        """Train as `Training.train`; what is published next is version iteration + 1."""
        report = await self._training.train(iteration, first)
        self.version = iteration + 1
        self._settled.set()
        return report

    @open_ended
    async def settled_version(self) -> int:
        with self.waits("settled_version", "the last step of a batch"):
            await self._settled.wait()
        return self.version

    @open_ended
    async def open_batch(self) -> int:
        await self._open.wait()
        return self.version

    @open_ended
    async def help_load(self, version: int) -> list[Span]:
        """Gather in the turn in which the engines load. In a thread: an engine may ask for this device meanwhile."""
        weights = LocalReceiver(self.engine).receive(version)
        async with self.turns.turn(f"rollout[{self.rank}].load"):
            with self.waits("help_load", f"engines to load version {version}"):
                await asyncio.to_thread(deque, weights, 0)
        return []

    def _begin_step(self, more: bool) -> None:
        self._settled.clear()
        if more:
            self._open.set()
        else:
            self._open.clear()

    async def _accumulate(self, batch: Batch, iteration: int) -> tuple[dict[str, float], Sequence[int]]:
        learnt = train_batch(self._learnt(batch), iteration, self.loss_mask)
        return await self.engine.accumulate(learnt), self.engine.rank_tokens(learnt)

    def _note_samples(self, report: TrainReport, batch: Batch, iteration: int) -> None:
        learnt = self._learnt(batch)
        report.sums = add_diagnostics(report.sums, _of_samples(learnt, iteration))
        rewards, failures = learnt.dense("reward"), texts_of(learnt.ragged("reward_failure"))
        failure = next(filter(None, failures), "")
        report.trained.append(TrainedRows(learnt.rows, samples_in(learnt), rewards, self.clock.now(), failure))
        if self.baseline_of is not None:
            first = samples_in(batch) % self.baseline_of == 0
            rewards = batch.dense("reward")[first]
            report.baselines |= zip(samples_in(batch)[first].tolist(), rewards.tolist(), strict=True)
            rewards = rewards[~np.isnan(rewards)]
            of_baselines = {"baselines": float(len(rewards)), "baseline_reward": float(rewards.sum(dtype=np.float64))}
            report.sums = add_diagnostics(report.sums, of_baselines)

    def _learnt(self, batch: Batch) -> Batch:
        """The batch without the samples that others were compared with."""
        if self.baseline_of is None:
            return batch
        return some_rows(batch, np.flatnonzero(samples_in(batch) % self.baseline_of))


def train_batch(batch: Batch, version: int, loss_mask: LossMask = SCORED_TOKENS) -> TrainBatch:
    """The columns that training reads, by the names of the formulas. version: before the batch's first step."""
    columns: dict[str, Any] = dict(batch.columns)
    return TrainBatch(
        prompts=columns["prompt"],
        responses=columns["response"],
        behaviour_log_probs=columns["log_probs"],
        versions=columns["versions"],
        advantages=columns["advantage"],
        ref_log_probs=columns.get("ref_log_probs"),
        old_log_probs=columns.get("old_log_probs"),
        old_versions=columns.get("old_version"),
        proximal_log_probs=columns.get("proximal_log_probs"),
        mask=loss_mask.of(batch, version),
        lags=Ragged(version - columns["versions"].values, columns["versions"].lengths),
        routes=columns.get(ROUTES),
    )


def _of_samples(batch: Batch, iteration: int) -> dict[str, float]:
    """Summed over samples: how many versions the policy behind `old_log_probs` is behind the trainer's, and the
    coefficients with which the KL was taken off the rewards."""
    sums: dict[str, float] = {}
    if "old_version" in batch.columns:
        old = batch.dense("old_version")
        sums |= {"scored": float(len(old)), "scored_lag": float((iteration - old).sum())}
    if "kl_coef" in batch.columns:
        coefficients = batch.dense("kl_coef")
        sums |= {"kl_samples": float(len(coefficients)), "kl_coef": float(coefficients.sum(dtype=np.float64))}
    return sums


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
        loss_mask: LossMask = SCORED_TOKENS,
        updates: Updates = ONE_STEP,
        reports: bool = True,
        **stage: Any,
    ) -> None:
        super().__init__(**stage)
        self.engine, self.rank, self.loss_mask = engine, rank, loss_mask
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
        mask = self.loss_mask.of(batch, iteration)
        learnt = ValueBatch(prompts, responses, values, returns, mask)
        return await self.engine.accumulate(learnt), self.engine.rank_tokens(learnt)

    def _note_samples(self, report: TrainReport, batch: Batch, iteration: int) -> None:
        lags = iteration - batch.dense("value_version")
        sums = {"samples": float(len(lags)), "lag": float(lags.sum()), "lag_max": float(lags.max())}
        report.sums = add_diagnostics(report.sums, sums)
