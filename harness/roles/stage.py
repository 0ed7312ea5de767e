"""The loop that reward, reference, actor_fwd and advantages share: read, compute, write."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping

from harness.protocols import Clock, Span
from harness.roles.dataflow import partition_name
from harness.transfer_queue import Batch, Column, TransferQueue


class Stage(ABC):
    """One worker of a role between rollout and training.

    role: the task it is in the queue; kind: what its spans are called; rows: the micro-batch, in samples;
    wait_timeout_s: the longest wait for rows, after which TimeoutError says which are missing.
    """

    role: str
    kind: str

    def __init__(
        self, queue: TransferQueue, clock: Clock, *, name: str, rows: int, minimum: int, wait_timeout_s: float
    ) -> None:
        self.queue, self.clock, self.name = queue, clock, name
        self.rows, self.minimum, self.wait_timeout_s = rows, minimum, wait_timeout_s
        self.version = 0

    async def process(self, iteration: int) -> list[Span]:
        """Consumes this role's inputs of one batch, produces its outputs, and returns when none is left.

        Waits for rows only; the roles before it unblock it. Result, receipt and the next request leave together: the
        queue takes the calls of one process in order, and if it refuses the result, that error ends the run.
        """
        spans: list[Span] = []
        batch = await self._fetch(iteration)
        while batch is not None:
            start = self.clock.now()
            columns = self.compute(batch)
            spans.append(Span(self.role, self.name, self.kind, start, self.clock.now(), self.version, iteration))
            _, _, batch = await asyncio.gather(
                self.queue.put(batch.partition, batch.rows, columns),
                self.queue.acknowledge(batch.lease),
                self._fetch(iteration),
            )
        return spans

    async def _fetch(self, iteration: int) -> Batch | None:
        return await self.queue.get(
            self.role,
            self.rows,
            minimum=self.minimum,
            partition=partition_name(iteration),
            consumer=self.name,
            timeout_s=self.wait_timeout_s,
        )

    @abstractmethod
    def compute(self, batch: Batch) -> Mapping[str, Column]:
        """The columns that this role adds to these rows."""
