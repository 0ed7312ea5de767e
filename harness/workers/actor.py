"""The actor: one rank of the training world, and the source of new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.protocols import FINISH_REASONS, Clock, Span, TrainBatch, TrainEngine
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
    step: dict[str, float] = field(default_factory=dict)
    """What `TrainEngine.step` said, the same on every rank."""
    spans: list[Span] = field(default_factory=list)


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
    ) -> None:
        """mask_truncated: responses that were cut off are read, and have no loss."""
        super().__init__(f"actor[{rank}]", turns)
        self.mask_truncated = mask_truncated
        self.engine, self.clock, self.reader = engine, clock, reader
        self.rank, self.name, self.device = rank, str(rank), device
        self.version = 0  # of the engine's parameters, as they are now

    @open_ended
    async def train(self, iteration: int, first: Deadlines = ()) -> TrainReport:
        """Consumes this rank's share of one batch, micro-batch by micro-batch; then one update.

        Waits for rows only; the roles before it unblock it. The next micro-batch is fetched while one is computed.
        """
        report, batches = TrainReport(), self.reader.read(iteration, first)
        fetch = self._fetch(batches, iteration)
        while True:
            waited_from = self.clock.now()
            batch = await fetch
            self._note(report, "wait_for_samples", waited_from, self.clock.now(), iteration)
            if batch is None:
                break
            fetch = self._fetch(batches, iteration)
            await asyncio.sleep(0)  # lets the request leave before the computation takes the process
            async with self.turn("train"):
                start = self.clock.now()
                sums = await self.engine.accumulate(train_batch(batch, self.mask_truncated))
                report.sums = add_diagnostics(report.sums, sums | _scored_ago(batch, iteration))
                self._note(report, "update_actor", start, self.clock.now(), iteration)
            report.trained.append(_trained_rows(batch, self.clock.now()))
        async with self.turn("train"):
            start = self.clock.now()
            with self.waits("train", "the other ranks' gradients"):
                report.step = await self.engine.step()
            self.version = iteration + 1
            self._note(report, "update_actor", start, self.clock.now(), iteration)
        return report

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


def one_report_per_group(reports: Sequence[TrainReport], tensor_parallel: int) -> list[TrainReport]:
    """All ranks' reports, with samples and sums in one of each tensor-parallel group: the others trained the same."""
    return [
        report if rank % tensor_parallel == 0 else replace(report, trained=[], sums={})
        for rank, report in enumerate(reports)
    ]


def train_batch(batch: Batch, mask_truncated: bool = False) -> TrainBatch:
    """The columns that training reads, by the names of the formulas."""
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
        mask=mask,
    )


def _scored_ago(batch: Batch, iteration: int) -> dict[str, float]:
    """How many versions the policy behind `old_log_probs` is behind the trainer's, summed over samples."""
    old = batch.columns.get("old_version")
    if old is None:
        return {}
    assert isinstance(old, np.ndarray)
    return {"scored": float(len(old)), "scored_lag": float((iteration - old).sum())}


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
