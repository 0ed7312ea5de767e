"""One rank's part in training a model: it reads its share of a batch, and makes of it optimizer steps. The actor's and
the critic's."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import ModelConfig, TrainingConfig
from harness.protocols import TRUNCATED, Clock, CriticEngine, Scorer, Span, TrainEngine, WrittenState
from harness.rl.diagnostics import add_diagnostics
from harness.runtime.runtime import RealClock
from harness.transfer_queue import Batch, Ragged
from harness.weight_sync.saving import save_adapters, save_weights, write_critic_config, write_policy_config
from harness.workers.dataflow import as_sampled
from harness.workers.readers import Deadlines, MicroBatchReader
from harness.workers.turns import ComputingRole, abandon


@dataclass
class TrainedRows:
    """Names a micro-batch that a rank trained, in the order of training. rows: of the queue, which has all else, int64
    [k]; samples: that they held, int64 [k]; rewards: float32 [k], NaN of those that could not be scored; at: seconds on
    the run's clock; failure: why one of them could not."""

    rows: np.ndarray
    samples: np.ndarray
    rewards: np.ndarray
    at: float
    failure: str = ""


@dataclass(frozen=True)
class Pass:
    """One micro-batch that was computed. tokens: of this rank's share, prompts and responses, or of each rank's where
    one stands for a world; seconds: that it lasted."""

    tokens: Sequence[int]
    seconds: float


@dataclass
class TrainReport:
    """One rank's share of an iteration. trained: of the actor's ranks; baselines: rewards of the samples that those
    were compared with, and that are not trained, by id; passes: one for each micro-batch, in each epoch."""

    trained: list[TrainedRows] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    """Results of `TrainEngine.step`, each time, the same on every rank."""
    spans: list[Span] = field(default_factory=list)
    baselines: dict[int, float] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)


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


@dataclass(frozen=True)
class Training:
    """role, name: whose spans these are, of kind `update_<role>`; owner: whose turns they take, in its loop `train`.
    accumulate: forward and backward of a micro-batch of an iteration; sums of what is to be told of it, and its tokens
    as `TrainEngine.rank_tokens` counts them. noted: is told
    of each micro-batch once, after it was computed first."""

    owner: ComputingRole
    engine: TrainEngine | CriticEngine
    clock: Clock
    reader: MicroBatchReader
    role: str
    name: str
    accumulate: Callable[[Batch, int], Awaitable[tuple[dict[str, float], Sequence[int]]]]
    noted: Callable[[TrainReport, Batch, int], None]
    updates: Updates = ONE_STEP
    begins_step: Callable[[bool], None] = lambda more: None
    """Called in the turn of each step, before it: whether rows of the batch may still be to come."""
    reports: bool = True
    """Whether this rank tells of samples: of ranks that share layers, and train on the same ones, only the first."""

    async def train(self, iteration: int, first: Deadlines = ()) -> TrainReport:
        """Consumes this rank's share of one batch, micro-batch by micro-batch; an update after each mini-batch.

        Waits for rows only; the roles before it unblock it. The next micro-batch is fetched while one is computed.
        """
        report = TrainReport()
        async with aclosing(self._arriving(report, iteration, first)) as arriving:
            await self._train(report, arriving, iteration)
        return report if self.reports else TrainReport(steps=report.steps, spans=report.spans)

    async def _train(self, report: TrainReport, arriving: AsyncIterator[Batch], iteration: int) -> None:
        updates, kept = self.updates, list[Batch]()
        if updates.whole_batch:
            kept += [await self._with_proximal(report, batch, iteration) async for batch in arriving]
            async with self._turn():
                for epoch in range(updates.epochs):
                    await self._pass(report, _again(kept), iteration, nullcontext, first=epoch == 0)
        else:
            arriving = _keeping(arriving, kept) if updates.epochs > 1 else arriving
            await self._pass(report, arriving, iteration, self._turn, first=True)
            for _ in range(1, updates.epochs):
                await self._pass(report, _again(kept), iteration, self._turn, first=False)

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
                await self._step(report, iteration, turn, more=first and not self.updates.whole_batch)
                since_step = 0
            async with turn():
                start = self.clock.now()
                sums, tokens = await self.accumulate(batch, iteration)
                report.sums, end = add_diagnostics(report.sums, sums), self.clock.now()
                report.passes.append(Pass(tokens, end - start))
                self._note(report, self._update, start, end, iteration)
            since_step += len(batch.rows)
            if rows is not None and since_step > rows:
                raise RuntimeError(f"a micro-batch goes {since_step - rows} rows beyond a mini-batch of {rows}")
            if first:
                self.noted(report, batch, iteration)
        await self._step(report, iteration, turn)

    async def _step(
        self,
        report: TrainReport,
        iteration: int,
        turn: Callable[[], AbstractAsyncContextManager[None]],
        *,
        more: bool = False,
    ) -> None:
        async with turn():
            start = self.clock.now()
            self.begins_step(more)
            with self.owner.waits("train", "the other ranks' gradients"):
                report.steps.append(await self.engine.step())
            self._note(report, self._update, start, self.clock.now(), iteration)

    async def _arriving(self, report: TrainReport, iteration: int, first: Deadlines) -> AsyncGenerator[Batch, None]:
        batches = self.reader.read(iteration, first)
        fetch = self._fetch(batches, iteration)
        try:
            while True:
                waited_from = self.clock.now()
                batch = await fetch
                self._note(report, "wait_for_samples", waited_from, self.clock.now(), iteration)
                if batch is None:
                    return
                fetch = self._fetch(batches, iteration)
                await asyncio.sleep(0)  # lets the request leave before the computation takes the process
                yield batch
        finally:
            abandon(fetch)

    async def _with_proximal(self, report: TrainReport, batch: Batch, iteration: int) -> Batch:
        """The batch with its log-probs by the weights as they are, where the loss is to stay near those."""
        if self.updates.scorer is None:
            return batch
        async with self._turn():
            start = self.clock.now()
            scores = await self.updates.scorer.log_probs(*as_sampled(batch))
            self._note(report, "old_log_prob", start, self.clock.now(), iteration)
        return replace(batch, columns={**batch.columns, "proximal_log_probs": scores})

    @property
    def _update(self) -> str:
        return f"update_{self.role}"

    def _turn(self) -> AbstractAsyncContextManager[None]:
        return self.owner.turn("train")

    def _fetch(self, batches: AsyncIterator[Batch], iteration: int) -> asyncio.Task[Batch | None]:
        async def fetch() -> Batch | None:
            with self.owner.waits("train", f"rows of batch {iteration}"):
                return await anext(batches, None)

        return asyncio.create_task(fetch())

    def _note(self, report: TrainReport, kind: str, start: float, end: float, iteration: int) -> None:
        report.spans.append(Span(self.role, self.name, kind, start, end, iteration, iteration))


async def _again(batches: Sequence[Batch]) -> AsyncIterator[Batch]:
    for batch in batches:
        yield batch


async def _keeping(batches: AsyncIterator[Batch], kept: list[Batch]) -> AsyncIterator[Batch]:
    async for batch in batches:
        kept.append(batch)
        yield batch


@dataclass(frozen=True)
class LossMask:
    """The tokens that have a loss: those that the policy sampled, but none of a response that could not be scored.

    truncated: nor of one that was cut off. max_staleness: nor those that lag by more versions; None: by any (xtuner,
    `max_token_staleness`).
    """

    truncated: bool = False
    max_staleness: int | None = None

    def of(self, batch: Batch, version: int) -> Ragged:
        """bool, a value per token. version: before the batch's first step."""
        mask, learnt = batch.ragged("loss_mask"), ~np.isnan(batch.dense("reward"))
        if self.truncated:
            learnt &= ~np.isin(batch.dense("finish_reason"), TRUNCATED)
        values = mask.values if learnt.all() else mask.values & np.repeat(learnt, mask.lengths)
        if self.max_staleness is not None:
            values = values & (version - batch.ragged("versions").values <= self.max_staleness)
        return Ragged(values, mask.lengths)


SCORED_TOKENS = LossMask()


class RememberingRole:
    """The base of a role with an engine that learns. version: of its parameters."""

    engine: Any  # that `Remembers`
    clock: Clock
    rank: int
    version: int
    _state: WrittenState | None = None

    async def copy_state(self) -> None:
        """Copy what training remembers, to be written next. Called between two batches."""
        self._state = await self.engine.state()

    async def write_state(self, folder: str) -> dict[str, tuple[int, str]]:
        """Write what was copied into a folder that is there; training goes on meanwhile. By file, bytes and SHA-256."""
        assert self._state is not None, "copy_state comes first"
        state, self._state = self._state, None
        if not isinstance(self.clock, RealClock):
            return state.write(Path(folder))
        return await asyncio.to_thread(state.write, Path(folder))

    async def load_state(self, folder: str, version: int) -> None:
        """Go on from there, where the weights were `version`; every rank calls it."""
        await self.engine.load(Path(folder))
        self.version = version

    async def save_policy(
        self, folder: str, model: ModelConfig, training: TrainingConfig, stop_tokens: tuple[int, ...], pad_token: int
    ) -> None:
        """All weights into a folder that is there, gathered, and what is to be known of them, or adapters alone: every
        rank calls it, rank 0 writes. The driver has no transformers, whose import takes seconds."""
        if training.lora_rank:
            base, adapters = model.checkpoint or model.name, self.engine.named_parameters()
            save_adapters(Path(folder), adapters, base, training, write=self.rank == 0)
            return
        if self.rank == 0:
            write_policy_config(Path(folder), model, stop_tokens, pad_token)
        self._save_weights(folder)

    async def save_critic(self, folder: str, model: ModelConfig) -> None:
        """The same of a critic."""
        if self.rank == 0:
            write_critic_config(Path(folder), model)
        self._save_weights(folder)

    def _save_weights(self, folder: str) -> None:
        parameters, holders = self.engine.named_parameters(), self.engine.holders()
        save_weights(Path(folder), parameters, write=self.rank == 0, holders=holders)
