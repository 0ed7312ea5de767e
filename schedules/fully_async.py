"""Fully asynchronous streaming: every role has its own devices and lives off the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schedules.base import Order, Schedule, gather, option
from schedules.capacity import CompletionOrder
from schedules.protocol import Job, PauseMode


@dataclass(frozen=True)
class FullyAsync(Schedule):
    """Engines never wait for the trainer, except to take weights; the trainer never waits for a whole batch.

    max_staleness: iterations by which a group may be ahead of the weights that sample it; fractions allowed.
    pause: what becomes of samples that run when weights arrive. keep: they go on under the new ones (their tokens
        carry versions); wait: engines first finish them; abort: they begin again under the new ones.
    order: fifo trains groups as they were admitted; completion as they are completed, so that long ones are overtaken.
    on_stale: what becomes, in completion order, of groups that would lag by more than ceil(max_staleness): wait for
        them in time, or drop them and generate others instead.

    Worst lag of any token: ceil(max_staleness), by the dispatch rule (see `Capacity`) and group-ordered training, or
    by `on_stale`.
    """

    transport = "collective"
    max_staleness: float = option(2.0, least=0, most=1_000_000)
    pause: PauseMode = "keep"
    order: Order = "fifo"
    on_stale: Literal["drop", "wait"] = "wait"

    @property
    def eta(self) -> float:
        return self.max_staleness

    async def run(self, job: Job) -> None:
        await gather(
            job.rollout.stream(),
            *(stage.stream() for stage in job.stages),
            self._train(job),
        )

    async def _train(self, job: Job) -> None:
        """Consumes trained columns, produces versions; each new version admits the next groups and unblocks engines."""
        started = CompletionOrder(self.capacity(job))
        for version in range(job.iterations):
            if self.order == "fifo":  # which group is next depends on nothing that engines start meanwhile
                await gather(self._go_on(job, version, started.limit), job.trainer.train(version))
            else:
                await self._go_on(job, version, started.limit)
                await self._train_batch(job, started, version)
            await job.rollout.pause(self.pause)
            await job.weights.publish(version + 1)
            started.publish()
        await self._go_on(job, job.iterations, started.limit)
        await job.prompts.close()

    async def _go_on(self, job: Job, version: int, limit: int) -> None:
        """Engines, which have this version, may start what is below the limit: they know before it is admitted, so that
        they start nothing under another one."""
        if version:
            await job.rollout.resume(below=limit)
        else:
            await job.rollout.set_dispatch_limit(below=limit)
        await job.prompts.admit(below=limit)

    async def _train_batch(self, job: Job, started: CompletionOrder, iteration: int) -> None:
        """In completion order."""
        if self.on_stale == "wait":
            await job.trainer.train(iteration, first=started.due())
        else:
            await self._drop(job, started)
            await job.trainer.train(iteration)

    async def _drop(self, job: Job, started: CompletionOrder) -> None:
        """Drops what would lag too much in this iteration, and lets engines start as many groups more."""
        if (overdue := started.overdue()) and (dropped := await job.prompts.drop(started_below=overdue)):
            limit = started.widen(dropped)
            await job.rollout.set_dispatch_limit(below=limit)
            await job.prompts.admit(below=limit)
