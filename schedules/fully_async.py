"""Fully asynchronous streaming: every role has its own devices and lives off the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schedules.base import Order, Schedule, gather, option
from schedules.capacity import CompletionOrder
from schedules.protocol import Job


@dataclass(frozen=True)
class FullyAsync(Schedule):
    """Engines never wait for the trainer, except to take weights; the trainer never waits for a whole batch.

    max_staleness: iterations by which a group may be ahead of the weights that sample it; fractions allowed.
    partial: samples that run while weights arrive go on under the new ones (their tokens carry versions);
        otherwise engines first finish what they run.
    order: fifo trains groups as they were admitted; completion as they are completed, so that long ones are overtaken.
    on_stale: what becomes, in completion order, of groups that would lag by more than ceil(max_staleness): wait for
        them in time, or drop them and generate others instead.

    Worst lag of any token: ceil(max_staleness), by the dispatch rule (see `Capacity`) and group-ordered training, or
    by `on_stale`.
    """

    transport = "collective"
    max_staleness: float = option(2.0, least=0, most=1_000_000)
    partial: bool = True
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
        limit = started.limit
        await job.rollout.set_dispatch_limit(below=limit)  # before there is anything to start: else it is under none
        await job.prompts.admit(below=limit)
        for version in range(1, job.iterations + 1):
            await self._train_batch(job, started, version - 1)
            await job.rollout.pause(drain=not self.partial)
            await job.weights.publish(version)
            limit = started.publish()
            await job.rollout.resume(below=limit)
            await job.prompts.admit(below=limit)
        await job.prompts.close()

    async def _train_batch(self, job: Job, started: CompletionOrder, iteration: int) -> None:
        if self.order == "fifo":
            await job.trainer.train(iteration)
        elif self.on_stale == "wait":
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
