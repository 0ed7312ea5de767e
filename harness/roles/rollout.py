"""The rollout role: groups from the queue into one engine, finished samples from the engine into the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from harness.protocols import Clock, Completion, Request, RolloutEngine, Span
from harness.roles.dataflow import partition_name
from harness.transfer_queue import Column, Ragged, TransferQueue
from harness.weight_sync.receiver import WeightOffer, WeightReceiver


class RolloutRole:
    """One rollout engine. `index` is its number, `share` the most samples it takes from the queue at once.

    With several engines a fair share keeps the first to ask from taking a whole batch for itself.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        queue: TransferQueue,
        clock: Clock,
        *,
        index: int,
        device: torch.device,
        group_size: int,
        share: int,
        keep_cache: bool,
        wait_timeout_s: float,
    ) -> None:
        if engine.slots < group_size:
            raise ValueError(f"engine.slots={engine.slots} is less than a group of {group_size}; give it more slots")
        self.engine, self.queue, self.clock, self.device = engine, queue, clock, device
        self.index, self.name, self.group_size, self.share = index, str(index), group_size, share
        self.keep_cache, self.wait_timeout_s = keep_cache, wait_timeout_s
        self._receiver: WeightReceiver | None = None
        self._partition_of: dict[int, str] = {}  # of every sample that is not back in the queue
        self._completed: list[Completion] = []
        self._news = asyncio.Event()  # set when a sample was completed, or came back in the queue
        self._room = asyncio.Event()
        self._empty = asyncio.Event()
        self._spans: list[Span] = []
        self._busy_since: float | None = None

    async def generate(self, iteration: int) -> list[Span]:
        """Generate everything of one batch that no other engine took, then give the device back."""
        self.engine.wake()
        await self._run(partition_name(iteration))
        self.engine.sleep()
        return self.take_spans()

    async def stream(self) -> list[Span]:
        """Generate what the dispatch limit allows until the queue is closed and exhausted."""
        await self._run(None)
        return self.take_spans()

    async def allow(self, below: int) -> None:
        """Dispatch rule: start only groups numbered under `below`. The queue enforces it, row by row."""
        await self.queue.set_bound("rollout", self.name, below * self.group_size)

    async def pause(self, drain: bool) -> None:
        """Stop between two tokens (running samples stay), or once the running ones are done."""
        await self.engine.pause("wait" if drain else "keep")
        self._close_span()

    async def join(self, offer: WeightOffer, number: int) -> None:
        """Become receiver `number` of the trainer's weights."""
        self._receiver = offer.receiver(number, self.device)

    async def load(self, version: int) -> list[Span]:
        """Take the weights of `version`. The KV cache of the old ones is dropped unless told to keep it."""
        assert self._receiver is not None, "load before join"
        start = self.clock.now()
        self._close_span()
        self.engine.load_weights(version, self._receiver.receive(version))
        if not self.keep_cache:
            self.engine.drop_cache()
        self._spans.append(Span("rollout", self.name, "load_weights", start, self.clock.now(), version, version - 1))
        return self.take_spans()

    async def resume(self, below: int) -> None:
        """Go on under the loaded weights, with a wider dispatch limit."""
        await self.allow(below)
        await self.engine.resume()
        self._open_span()

    def take_spans(self) -> list[Span]:
        """Spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    async def _run(self, partition: str | None) -> None:
        async with asyncio.TaskGroup() as loops:
            drain = loops.create_task(self._drain())
            write = loops.create_task(self._write())
            await self._feed(partition)
            while self._partition_of:
                self._empty.clear()
                await self._empty.wait()
            drain.cancel()
            write.cancel()
        self._close_span()

    async def _feed(self, partition: str | None) -> None:
        """Consumes groups, produces requests. Waits for free slots (unblocked by `_drain`) and for groups that the
        dispatch limit allows (unblocked by admission and by new weights). Ends when the queue has no more."""
        # With one batch to share out, whoever asks first must leave the others theirs; it may take more as it finishes.
        most = self.engine.slots if partition is None else min(self.engine.slots, self.share)
        while True:
            free = most - self.engine.running - self.engine.waiting
            if free < self.group_size:
                self._room.clear()
                await self._room.wait()
                continue
            batch = await self.queue.get(
                "rollout",
                min(self.share, free // self.group_size * self.group_size),
                minimum=self.group_size,
                partition=partition,
                consumer=self.name,
                timeout_s=self.wait_timeout_s,
            )
            if batch is None:
                return
            prompts = batch.columns["prompt"]
            assert isinstance(prompts, Ragged)
            rows = batch.rows.tolist()
            self._partition_of.update(dict.fromkeys(rows, batch.partition))
            self.engine.submit([Request(row, prompt) for row, prompt in zip(rows, prompts.rows(), strict=True)])
            self._open_span()

    async def _drain(self) -> None:
        """Consumes finished samples as the engine streams them out; unblocks `_feed` (slots) and `_write` (rows)."""
        while True:
            finished = await self.engine.finished()
            self._completed += finished  # in two steps: `+=` across the await would bring back what was written
            if not self.engine.running and not self.engine.waiting:
                self._close_span()
            self._room.set()
            self._news.set()

    async def _write(self) -> None:
        """Consumes completions, produces rows. What finishes while a put is under way goes with the next one."""
        while True:
            await self._news.wait()
            self._news.clear()
            completed, self._completed = self._completed, []
            by_partition: dict[str, list[Completion]] = {}
            for completion in completed:
                by_partition.setdefault(self._partition_of[completion.sample_id], []).append(completion)
            for partition, part in by_partition.items():
                await self.queue.put(partition, [c.sample_id for c in part], self._columns(part))
                for completion in part:
                    del self._partition_of[completion.sample_id]
            if not self._partition_of:
                self._empty.set()

    def _columns(self, completed: Sequence[Completion]) -> Mapping[str, Column]:
        return {
            "response": Ragged.from_rows([c.tokens for c in completed]),
            "log_probs": Ragged.from_rows([c.log_probs for c in completed]),
            "versions": Ragged.from_rows([c.versions for c in completed]),
            "engine": np.full(len(completed), self.index, np.int32),
            "started_at": np.array([c.started_at for c in completed], np.float64),
            "finished_at": np.array([c.finished_at for c in completed], np.float64),
        }

    def _open_span(self) -> None:
        if self._busy_since is None and (self.engine.running or self.engine.waiting):
            self._busy_since = self.clock.now()

    def _close_span(self) -> None:
        if self._busy_since is not None:
            version = self.engine.version
            self._spans.append(
                Span("rollout", self.name, "generate", self._busy_since, self.clock.now(), version, version)
            )
            self._busy_since = None
