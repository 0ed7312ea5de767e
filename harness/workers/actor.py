"""The actor: one rank of the training world, and the source of new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.protocols import FINISH_REASONS, Clock, Scorer, Span, TrainBatch, TrainEngine
from harness.rl.diagnostics import add_diagnostics
from harness.runtime.runtime import open_ended
from harness.transfer_queue import Batch, Ragged
from harness.weight_sync.endpoints import SendingWorker
from harness.weight_sync.saving import save_weights
from harness.workers.computing_role import ComputingRole
from harness.workers.readers import Deadlines, MicroBatchReader
from harness.workers.turns import NO_TURNS, Turns


@dataclass
class TrainedRows:
    """What the samples of one rank went through. Arrays are [k], in the order of training; ragged ones per token."""

    rows: np.ndarray
    engine: np.ndarray
    responses: Ragged
    loss_mask: Ragged
    log_probs: Ragged
    versions: Ragged
    prompt_tokens: np.ndarray
    reward: np.ndarray
    exact_match: np.ndarray
    reward_failed: np.ndarray
    admitted_at: np.ndarray
    started_at: np.ndarray
    finished_at: np.ndarray
    finish_reason: np.ndarray
    turns: np.ndarray
    trained_at: np.ndarray
    score_extras: Ragged | None = None
    """A value for each of the task's `extra_metrics`, where it has any."""


@dataclass
class TrainReport:
    """One rank's share of an iteration."""

    trained: list[TrainedRows] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    """What `TrainEngine.step` said each time, the same on every rank."""
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Updates:
    """How a rank's share of a batch becomes optimizer steps.

    rows: of its part of a mini-batch, after which it makes a step; None: one step takes all. epochs: passes over the
    batch, in the same order; what is needed again is kept in host memory. whole_batch: the first step waits for the
    whole batch, and all steps are one turn, so that whoever scores by the trainer's weights does so before the first
    step or after the last. scorer: of these weights, where the loss is to stay near them; goes with whole_batch.
    """

    rows: int | None = None
    epochs: int = 1
    whole_batch: bool = False
    scorer: Scorer | None = None


ONE_STEP = Updates()


class ActorRole(ComputingRole, SendingWorker):
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
        mask_truncated: bool = False,
        updates: Updates = ONE_STEP,
    ) -> None:
        """mask_truncated: responses that were cut off are read, and have no loss."""
        super().__init__(f"actor[{rank}]", turns)
        self.mask_truncated = mask_truncated
        self.updates = updates
        self.engine, self.clock, self.reader = engine, clock, reader
        self.rank, self.name, self.device = rank, str(rank), device
        self.version = 0  # of the engine's parameters, as they are now

    @open_ended
    async def train(self, iteration: int, first: Deadlines = ()) -> TrainReport:
        """Consumes this rank's share of one batch, micro-batch by micro-batch; an update after each mini-batch.

        Waits for rows only; the roles before it unblock it. The next micro-batch is fetched while one is computed.
        """
        report, updates = TrainReport(), self.updates
        arriving = self._arriving(report, iteration, first)
        kept: list[Batch] = []
        if updates.whole_batch:
            kept += [await self._with_proximal(report, batch, iteration) async for batch in arriving]
            async with self.turn("train"):
                for epoch in range(updates.epochs):
                    await self._pass(report, _again(kept), iteration, nullcontext, first=epoch == 0)
        else:
            arriving = _keeping(arriving, kept) if updates.epochs > 1 else arriving
            await self._pass(report, arriving, iteration, self._turn, first=True)
            for _ in range(1, updates.epochs):
                await self._pass(report, _again(kept), iteration, self._turn, first=False)
        self.version = iteration + 1
        return report

    async def _pass(
        self,
        report: TrainReport,
        batches: AsyncIterator[Batch],
        iteration: int,
        turn: Callable[[], AbstractAsyncContextManager[None]],
        *,
        first: bool,
    ) -> None:
        """Once over the batch, with an update after the rows of each mini-batch; the last one when there are no more.
        first: of the batch's passes, in which its samples are noted."""
        rows, since_step = self.updates.rows, 0
        async for batch in batches:
            if rows is not None and since_step == rows:
                await self._step(report, iteration, turn)
                since_step = 0
            async with turn():
                start = self.clock.now()
                sums = await self.engine.accumulate(train_batch(batch, iteration, self.mask_truncated))
                report.sums = add_diagnostics(report.sums, sums | (_of_samples(batch, iteration) if first else {}))
                self._note(report, "update_actor", start, self.clock.now(), iteration)
            since_step += len(batch.rows)
            if rows is not None and since_step > rows:
                raise RuntimeError(f"a micro-batch goes {since_step - rows} rows beyond a mini-batch of {rows}")
            if first:
                report.trained.append(_trained_rows(batch, self.clock.now()))
        await self._step(report, iteration, turn)

    async def _step(
        self, report: TrainReport, iteration: int, turn: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        async with turn():
            start = self.clock.now()
            with self.waits("train", "the other ranks' gradients"):
                report.steps.append(await self.engine.step())
            self._note(report, "update_actor", start, self.clock.now(), iteration)

    async def _arriving(self, report: TrainReport, iteration: int, first: Deadlines) -> AsyncIterator[Batch]:
        batches = self.reader.read(iteration, first)
        fetch = self._fetch(batches, iteration)
        while True:
            waited_from = self.clock.now()
            batch = await fetch
            self._note(report, "wait_for_samples", waited_from, self.clock.now(), iteration)
            if batch is None:
                return
            fetch = self._fetch(batches, iteration)
            await asyncio.sleep(0)  # lets the request leave before the computation takes the process
            yield batch

    async def _with_proximal(self, report: TrainReport, batch: Batch, iteration: int) -> Batch:
        """With its log-probs by the weights as they are, where the loss is to stay near those."""
        if self.updates.scorer is None:
            return batch
        async with self.turn("train"):
            start = self.clock.now()
            scores = await self.updates.scorer.log_probs(batch.ragged("prompt"), batch.ragged("response"))
            self._note(report, "old_log_prob", start, self.clock.now(), iteration)
        return replace(batch, columns={**batch.columns, "proximal_log_probs": scores})

    def _turn(self) -> AbstractAsyncContextManager[None]:
        return self.turn("train")

    def _fetch(self, batches: AsyncIterator[Batch], iteration: int) -> asyncio.Task[Batch | None]:
        async def fetch() -> Batch | None:
            with self.waits("train", f"rows of batch {iteration}"):
                return await anext(batches, None)

        return asyncio.create_task(fetch())

    def _note(self, report: TrainReport, kind: str, start: float, end: float, iteration: int) -> None:
        report.spans.append(Span("actor", self.name, kind, start, end, iteration, iteration))

    async def save_weights(self, folder: str) -> None:
        """All weights into a folder that is there, gathered; every rank calls it, rank 0 writes."""
        save_weights(Path(folder), self.engine.named_parameters(), write=self.rank == 0)


async def _again(batches: Sequence[Batch]) -> AsyncIterator[Batch]:
    for batch in batches:
        yield batch


async def _keeping(batches: AsyncIterator[Batch], kept: list[Batch]) -> AsyncIterator[Batch]:
    async for batch in batches:
        kept.append(batch)
        yield batch


def one_report_per_group(reports: Sequence[TrainReport], tensor_parallel: int) -> list[TrainReport]:
    """All ranks' reports, with samples and sums in one of each tensor-parallel group: the others trained the same."""
    return [
        report if rank % tensor_parallel == 0 else replace(report, trained=[], sums={})
        for rank, report in enumerate(reports)
    ]


def train_batch(batch: Batch, version: int, mask_truncated: bool = False) -> TrainBatch:
    """The columns that training reads, by the names of the formulas. version: before the batch's first step."""
    columns: dict[str, Any] = dict(batch.columns)
    mask = columns["loss_mask"]
    if mask_truncated:
        whole = columns["finish_reason"] != FINISH_REASONS.index("length")
        mask = Ragged(mask.values & np.repeat(whole, mask.lengths), mask.lengths)
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
        mask=mask,
        lags=Ragged(version - columns["versions"].values, columns["versions"].lengths),
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


def _trained_rows(batch: Batch, at: float) -> TrainedRows:
    columns: dict[str, Any] = dict(batch.columns)
    return TrainedRows(
        rows=batch.rows,
        engine=columns["engine"],
        responses=columns["response"],
        loss_mask=columns["loss_mask"],
        log_probs=columns["log_probs"],
        versions=columns["versions"],
        prompt_tokens=columns["prompt"].lengths,
        reward=columns["reward"],
        exact_match=columns["exact_match"],
        reward_failed=columns["reward_failed"],
        admitted_at=columns["admitted_at"],
        started_at=columns["started_at"],
        finished_at=columns["finished_at"],
        finish_reason=columns["finish_reason"],
        turns=columns["turns"],
        trained_at=np.full(len(batch.rows), at),
        score_extras=columns.get("score_extras"),
    )
