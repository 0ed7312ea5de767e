"""Separate pools, of which the trainer's generates, too, while the trainer would only wait for samples."""

import asyncio
import math
from dataclasses import dataclass

from schedules.base import Order, Schedule, gather, go_on, option
from schedules.capacity import CompletionOrder
from schedules.protocol import Job


@dataclass(frozen=True)
class Lending(Schedule):
    """`fully_async`, but training devices have engines of their own. Where a batch is not complete when the trainer
    could begin it, they take the weights from the trainer beside them and generate, until there is enough to begin
    with; what they have under way then goes on in the other engines, from the tokens that it has (the hybrid replicas
    of verl's dynamic scheduling).

    max_staleness: iterations by which a group may be ahead of the weights that sample it; fractions allowed.
    order: fifo trains groups as they were admitted; completion as they are completed, so that long ones are overtaken.
    share: of a batch, that is complete before training devices train.
    patience_s: seconds that the trainer waits for it before it lends its devices: about as many as lending them and
        taking them back costs, so that a trainer never loses more than twice what it had to.

    Worst lag of any token: ceil(max_staleness), as of `fully_async`.
    """

    transport = "collective"
    lends = True
    follows_time = True
    max_staleness: float = option(2.0, least=0, most=1_000_000)
    order: Order = option("fifo")
    share: float = option(0.4, least=0, most=1)
    patience_s: float = option(1.0, least=0.001)

    @property
    def eta(self) -> float:
        return self.max_staleness

    async def run(self, job: Job) -> None:
        await gather(job.rollout.stream(), *(stage.stream() for stage in job.stages), self._train(job))

    async def _train(self, job: Job) -> None:
        """Consumes trained columns, produces versions; each one published admits the next groups and unblocks
        engines."""
        started = CompletionOrder(self.capacity(job))
        for version in range(job.iterations):
            await go_on(job, version, started.limit)
            await self._fill(job, version, started.limit)
            await job.trainer.train(version, first=() if self.order == "fifo" else started.due())
            await job.rollout.pause("keep")
            await job.weights.publish(version + 1)
            started.record_published()
        await go_on(job, job.iterations, started.limit)
        await job.prompts.close()

    async def _fill(self, job: Job, version: int, limit: int) -> None:
        """Wait for enough samples to begin with; unblocked by all engines, where that takes long."""
        async with asyncio.TaskGroup() as tasks:
            filled = tasks.create_task(job.rollout.filled(math.ceil((version + self.share) * job.batch)))
            if (await asyncio.wait([filled], timeout=self.patience_s))[0]:
                return
            if version:
                await job.weights.swap(job.lent, version)
            await gather(job.lent.stream(), self._lend(job, limit, filled))

    async def _lend(self, job: Job, limit: int, filled: asyncio.Task[None]) -> None:
        await job.lent.resume(below=limit)
        await filled
        await job.lent.hand_over(job.rollout)
