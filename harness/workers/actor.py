"""The actor: one rank of the training world, and the source of new weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from harness.protocols import Clock, Span, TrainBatch, TrainEngine
from harness.rl.diagnostics import add_diagnostics
from harness.runtime.waits import Waits
from harness.transfer_queue import Batch, Ragged
from harness.weight_sync.collective import CollectiveOffer
from harness.weight_sync.cuda_ipc import CudaSlots
from harness.weight_sync.host_staged import HostStagedOffer
from harness.weight_sync.ipc import share_slots
from harness.weight_sync.plan import TransferPlan, gathered, plan_transfer
from harness.weight_sync.process_group import open_rendezvous
from harness.weight_sync.receiver import GatherOnlySender, HostSender, WeightOffer, WeightSender, WeightSource
from harness.workers.readers import Deadlines, MicroBatchReader, Share


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
    score_extras: Ragged | None = None
    """A value for each of the task's `extra_metrics`, where it has any."""


@dataclass
class TrainReport:
    """One rank's share of an iteration."""

    trained: list[TrainedRows] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    spans: list[Span] = field(default_factory=list)


class ActorRole:
    """One training rank. `reader` knows in which order it takes groups."""

    def __init__(
        self,
        engine: TrainEngine,
        clock: Clock,
        *,
        rank: int,
        reader: MicroBatchReader,
        device: torch.device,
    ) -> None:
        self.engine, self.clock, self.reader = engine, clock, reader
        self.rank, self.name, self.device = rank, str(rank), device
        self.waits = Waits(f"actor[{rank}]")
        self._sender: WeightSender | None = None
        self._joined: WeightSender | None = None  # the last one that met its receivers, whatever paces it
        self._source: WeightSource
        self._store: dist.Store

    async def train(self, iteration: int, first: Deadlines = ()) -> TrainReport:
        """Consumes this rank's share of one batch, micro-batch by micro-batch; then one update.

        Waits for rows only; the roles before it unblock it. The next micro-batch is fetched while one is computed.
        """
        report, share = TrainReport(), self.reader.share(iteration, first)
        fetch = self._fetch(share, iteration)
        while True:
            waited_from = self.clock.now()
            batch = await fetch
            start = self.clock.now()
            self._note(report, "wait_for_samples", waited_from, start, iteration)
            if batch is None:
                break
            fetch = self._fetch(share, iteration)
            await asyncio.sleep(0)  # lets the request leave before the computation takes the process
            sums = await self.engine.accumulate(train_batch(batch))
            report.sums = add_diagnostics(report.sums, sums | _scored_ago(batch, iteration))
            self._note(report, "update_actor", start, self.clock.now(), iteration)
            report.trained.append(_trained_rows(batch, self.clock.now()))
        start = self.clock.now()
        with self.waits("train", "the other ranks' gradients"):
            report.grad_norm = (await self.engine.step())["grad_norm"]
        self._note(report, "update_actor", start, self.clock.now(), iteration)
        return report

    def _fetch(self, share: Share, iteration: int) -> asyncio.Task[Batch | None]:
        async def fetch() -> Batch | None:
            with self.waits("train", f"rows of batch {iteration}"):
                return await share.fetch()

        return asyncio.create_task(fetch())

    def _note(self, report: TrainReport, kind: str, start: float, end: float, iteration: int) -> None:
        report.spans.append(Span("actor", self.name, kind, start, end, iteration, iteration))

    async def plan(self, bucket_bytes: int, checked: bool = False) -> TransferPlan:
        """The transfer plan of this model's weights."""
        return plan_transfer(self.engine.named_parameters().items(), bucket_bytes, checked)

    async def gather_only(self, plan: TransferPlan) -> None:
        """For ranks other than 0: help to gather, send nothing."""
        await self.use(GatherOnlySender(plan))

    async def open_shared(self, plan: TransferPlan, host: str, receivers: int, timeout_s: float) -> WeightOffer:
        """For rank 0: offer weights through memory that it shares with receivers on its device or, where there are
        more devices, on its host. `meet_receivers` must follow while the receivers join."""
        rendezvous, self._store = open_rendezvous(host, receivers, timeout_s)
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if self.device.type == "cuda" and alone:
            slots = CudaSlots(plan, rendezvous, self.device)
            self._source = slots
            return slots.offer
        self._source = offer = share_slots(plan, rendezvous)
        return offer

    async def open_collective(self, plan: TransferPlan, host: str, receivers: int, timeout_s: float) -> WeightOffer:
        """For rank 0: offer weights by broadcast. `meet_receivers` must follow, as above."""
        rendezvous, self._store = open_rendezvous(host, receivers, timeout_s)
        self._source = offer = CollectiveOffer(plan, rendezvous)
        return offer

    async def open_host_staged(self, plan: TransferPlan, host: str, receivers: int, timeout_s: float) -> WeightOffer:
        """For rank 0: offer weights from host memory to host memory. `meet_receivers` must follow, as above."""
        rendezvous, self._store = open_rendezvous(host, receivers, timeout_s)
        self._source = offer = HostStagedOffer(plan, rendezvous)
        return offer

    async def meet_receivers(self) -> None:
        """For rank 0: the other half of `open_...`. What the sender before had under way can be sent again."""
        self._joined = self._source.sender(self._store, self.device, self._joined)
        await self.use(self._joined)

    async def use(self, sender: WeightSender) -> None:
        """Send weights by this sender, which reaches its receivers already."""
        self._sender = sender

    async def publish(self, version: int) -> list[Span]:
        """Send the weights, now called `version`; returns when the trainer may go on.

        By broadcast, every receiver must be in `load` meanwhile. To host memory, they travel on in the background.
        """
        if self._sender is None:
            raise RuntimeError("publish before the transport was opened; see Coordinator.connect")
        start = self.clock.now()
        with self.waits("publish", f"version {version} to be taken"):
            await self._sender.send(version, self.engine.named_parameters())
        return [Span("actor", self.name, "publish_weights", start, self.clock.now(), version, version - 1)]

    async def wait_arrived(self, version: int) -> None:
        """Wait until `version`, the last one published, left for all receivers, where it travels in the background."""
        if isinstance(self._sender, HostSender):
            with self.waits("wait_arrived", f"version {version} to leave"):
                await self._sender.wait_arrived(version)

    async def resend(self, version: int) -> None:
        """Let `version`, the last one published, travel once more in the background."""
        assert isinstance(self._sender, HostSender), "only what is kept in host memory can be sent again"
        await self._sender.resend(version)

    async def waiting(self) -> list[str]:
        """What this rank waits for, a line each."""
        return self.waits.lines()

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
        log_probs=columns["log_probs"],
        versions=columns["versions"],
        prompt_tokens=columns["prompt"].lengths,
        reward=columns["reward"],
        exact_match=columns["exact_match"],
        admitted_at=columns["admitted_at"],
        started_at=columns["started_at"],
        finished_at=columns["finished_at"],
        trained_at=np.full(len(batch.rows), at),
        score_extras=columns.get("score_extras"),
    )
