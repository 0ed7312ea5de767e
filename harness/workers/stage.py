"""The loop that reward, reference, actor_fwd and advantages share: read, compute, write."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping

from harness.protocols import Clock, Span
from harness.runtime.runtime import Waits
from harness.transfer_queue import Batch, Column, TransferQueue
from harness.workers.dataflow import iteration_of, partition_name


class Stage(ABC):
    """One worker of a role between rollout and training.

    role: the task it is in the queue; kind: what its spans are called; rows: the micro-batch, in samples;
    wait_timeout_s: the longest wait for rows, after which TimeoutError says which are missing.
    """

    role: str
    kind: str

    def __init__(
        self, queue: TransferQueue, clock: Clock, *, name: str, rows: int, minimum: int, wait_timeout_s: float | None
    ) -> None:
        self.queue, self.clock, self.name = queue, clock, name
        self.rows, self.minimum, self.wait_timeout_s = rows, minimum, wait_timeout_s
        self.version = 0
        self.waits = Waits(f"{self.role}[{name}]")
        self._spans: list[Span] = []

    async def process(self, iteration: int) -> list[Span]:
        """Work through one batch; returns when none of its rows is left."""
        await self._work(partition_name(iteration))
        return await self.take_spans()

    async def stream(self) -> list[Span]:
        """Work through every batch, whichever has rows, until the queue is closed and exhausted.

        Returns the last spans only: `take_spans` hands the others out while the run goes on.
        """
        await self._work(None)
        return await self.take_spans()

    async def take_spans(self) -> list[Span]:
        """Spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    async def waiting(self) -> list[str]:
        """What this worker's loops wait for, a line each."""
        return self.waits.lines()

    async def _work(self, partition: str | None) -> None:
        """Consumes this role's inputs, of one partition or of all, and produces its outputs.

        Waits for rows only; the roles before it unblock it. Result and the next request leave together: the queue
        takes the calls of one process in order, and if it refuses the result, that error ends the run.
        """
        batch = await self._fetch(partition)
        while batch is not None:
            start = self.clock.now()
            columns = await self.compute(batch)
            iteration = iteration_of(batch.partition)
            self._spans.append(Span(self.role, self.name, self.kind, start, self.clock.now(), self.version, iteration))
            _, batch = await asyncio.gather(
                self.queue.put(batch.partition, batch.rows, columns),
                self._fetch(partition),
            )

    async def _fetch(self, partition: str | None) -> Batch | None:
        with self.waits("work", f"rows of {partition or 'any batch'}"):
            return await self.queue.get(
                self.role,
                self.rows,
                minimum=self.minimum,
                partition=partition,
                consumer=self.name,
                timeout_s=self.wait_timeout_s,
            )

    @abstractmethod
    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        """The columns that this role adds to these rows."""
