"""The actor: one rank of the training world, and the source of new weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness.protocols import Clock, Span, TrainBatch, TrainEngine
from harness.rl.diagnostics import add_diagnostics
from harness.roles.dataflow import partition_name
from harness.transfer_queue import Batch, Ragged, TransferQueue
from harness.weight_sync.collective import open_store
from harness.weight_sync.ipc import SharedOffer, SharedWeights, create_buffer
from harness.weight_sync.plan import TransferPlan, gathered, plan_transfer
from harness.weight_sync.receiver import Follower, WeightOffer, WeightSender


@dataclass
class TrainedRows:
    """What the samples of one rank went through. Arrays are [k], in the order of training; ragged ones per token."""

    rows: np.ndarray
    engine: np.ndarray
    responses: Ragged
    log_probs: Ragged
    versions: Ragged
    prompt_tokens: np.ndarray
    reward: np.ndarray
    exact_match: np.ndarray
    admitted_at: np.ndarray
    started_at: np.ndarray
    finished_at: np.ndarray
    trained_at: np.ndarray


@dataclass
class TrainReport:
    """One rank's share of an iteration."""

    trained: list[TrainedRows] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    spans: list[Span] = field(default_factory=list)


class ActorRole:
    """rows: samples of this rank's micro-batch."""

    def __init__(
        self,
        engine: TrainEngine,
        queue: TransferQueue,
        clock: Clock,
        *,
        rank: int,
        rows: int,
        device: torch.device,
        wait_timeout_s: float,
    ) -> None:
        self.engine, self.queue, self.clock = engine, queue, clock
        self.rank, self.name, self.rows, self.device = rank, str(rank), rows, device
        self.wait_timeout_s = wait_timeout_s
        self._sender: WeightSender | None = None

    async def train(self, iteration: int) -> TrainReport:
        """Consumes this rank's share of one batch, micro-batch by micro-batch in group order; then one update.

        Waits for rows only; the roles before it unblock it. The next micro-batch is fetched, and the receipt for the
        last one travels, while one is computed.
        """
        report, fetch = TrainReport(), self._fetch(iteration)
        receipts: list[asyncio.Task[None]] = []
        while True:
            waited_from = self.clock.now()
            batch = await fetch
            start = self.clock.now()
            self._note(report, "wait_for_samples", waited_from, start, iteration)
            if batch is None:
                break
            fetch = self._fetch(iteration)
            await asyncio.sleep(0)  # lets the request leave before the computation takes the process
            report.sums = add_diagnostics(report.sums, self.engine.accumulate(train_batch(batch)))
            self._note(report, "update_actor", start, self.clock.now(), iteration)
            report.trained.append(_trained_rows(batch, self.clock.now()))
            receipts.append(asyncio.create_task(self.queue.acknowledge(batch.lease)))
            await asyncio.sleep(0)
        start = self.clock.now()
        report.grad_norm = self.engine.step()["grad_norm"]
        self._note(report, "update_actor", start, self.clock.now(), iteration)
        await asyncio.gather(*receipts)
        return report

    def _fetch(self, iteration: int) -> asyncio.Task[Batch | None]:
        return asyncio.create_task(
            self.queue.get(
                "actor",
                self.rows,
                partition=partition_name(iteration),
                rank=self.rank,
                consumer=self.name,
                timeout_s=self.wait_timeout_s,
            )
        )

    def _note(self, report: TrainReport, kind: str, start: float, end: float, iteration: int) -> None:
        report.spans.append(Span("actor", self.name, kind, start, end, iteration, iteration))

    async def plan(self, bucket_bytes: int) -> TransferPlan:
        """The transfer plan of this model's weights."""
        return plan_transfer(self.engine.named_parameters().items(), bucket_bytes)

    async def follow(self, plan: TransferPlan) -> None:
        """For ranks other than 0: help to gather, send nothing."""
        self._sender = Follower(plan)

    async def open_shared(self, plan: TransferPlan) -> SharedOffer:
        """For rank 0: offer weights through shared memory."""
        offer = create_buffer(plan)
        self._sender = SharedWeights(offer)
        return offer

    async def open_collective(self, plan: TransferPlan, host: str, receivers: int, timeout_s: float) -> WeightOffer:
        """For rank 0: offer weights by broadcast. `join_collective` must follow while the receivers join."""
        offer, self._store = open_store(plan, host, receivers, timeout_s)
        self._offer = offer
        return offer

    async def join_collective(self) -> None:
        """For rank 0: meet the receivers."""
        self._sender = self._offer.sender(self._store, self.device)

    async def publish(self, version: int) -> list[Span]:
        """Send the weights, now called `version`. By broadcast, every receiver must be in `load` meanwhile."""
        if self._sender is None:
            raise RuntimeError("publish before the transport was opened; see Coordinator.connect")
        start = self.clock.now()
        self._sender.send(version, self.engine.named_parameters())
        return [Span("actor", self.name, "publish_weights", start, self.clock.now(), version, version - 1)]

    async def full_weights(self) -> dict[str, torch.Tensor] | None:
        """All weights on the CPU, gathered; every rank calls it, rank 0 gets them."""
        full: dict[str, torch.Tensor] = {}
        for name, parameter in self.engine.named_parameters().items():
            tensor = gathered(parameter)
            if self.rank == 0:
                full[name] = tensor.cpu().clone()
        return full if self.rank == 0 else None


def train_batch(batch: Batch) -> TrainBatch:
    """The columns that training reads, by the names of the formulas."""
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
    )


def _trained_rows(batch: Batch, at: float) -> TrainedRows:
    columns: dict[str, Any] = dict(batch.columns)
    return TrainedRows(
        rows=batch.rows,
        engine=columns["engine"],
        responses=columns["response"],
        log_probs=columns["log_probs"],
        versions=columns["versions"],
        prompt_tokens=columns["prompt"].lengths,
        reward=columns["reward"],
        exact_match=columns["exact_match"],
        admitted_at=columns["admitted_at"],
        started_at=columns["started_at"],
        finished_at=columns["finished_at"],
        trained_at=np.full(len(batch.rows), at),
    )
