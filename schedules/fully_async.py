"""Fully asynchronous streaming: every role has its own devices and lives off the queue."""

from dataclasses import dataclass
from typing import Literal

from schedules.base import Order, Schedule, gather, go_on, option
from schedules.capacity import CompletionOrder
from schedules.protocol import Job, PauseMode


@dataclass(frozen=True)
class FullyAsync(Schedule):
    """Engines never wait for the trainer, except to take weights; the trainer never waits for a whole batch.

    max_staleness: iterations by which a group may be ahead of the weights that sample it; fractions allowed.
    pause: what becomes of samples that run when weights arrive. keep: they go on under the new ones (their tokens
        carry versions); wait: engines first finish them; abort: they begin again under the new ones.
    order: fifo trains groups as they were admitted; completion as they are completed, so that long ones are overtaken.
    on_stale: in completion order, wait in time for groups that would lag by more than ceil(max_staleness), or drop
        them and generate others instead.
    publish_every: iterations from one version that engines get, and stop for, to the next; versions in between are the
        trainer's alone. max_staleness must be publish_every - 1 or more: so far ahead one version samples.

    Worst lag of any token: ceil(max_staleness), by the dispatch rule (see `Capacity`) and order, or by on_stale.
    """

    transport = "collective"
    max_staleness: float = option(2.0, least=0, most=1_000_000)
    pause: PauseMode = option(
        "keep", read_where=("schedule.max_staleness is above 0", lambda own: own.max_staleness > 0)
    )
    order: Order = option("fifo")
    on_stale: Literal["drop", "wait"] = option(
        "wait", read_where=("schedule.order is not fifo", lambda own: own.order != "fifo")
    )
    publish_every: int = option(1, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness < (ahead := self.publish_every - 1):
            raise ValueError(
                f"schedule.publish_every={self.publish_every}: the last batch before engines get new weights is "
                f"{ahead} iterations ahead of those that sample it, more than schedule.max_staleness="
                f"{self.max_staleness:g} allows; set max_staleness={ahead} or more"
            )

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
            new = [go_on(job, version, started.limit)] if version % self.publish_every == 0 else []
            if self.order == "fifo":  # which group is next depends on nothing that engines start meanwhile
                await gather(*new, job.trainer.train(version))
            else:
                await gather(*new)
                await self._train_batch(job, started, version)
            await self._make_known(job, started, version + 1)
        await go_on(job, job.iterations, started.limit)
        await job.prompts.close()

    async def _make_known(self, job: Job, started: CompletionOrder, version: int) -> None:
        """Publish a version to the engines if it is its turn, or the last one."""
        if version % self.publish_every and version < job.iterations:
            await job.weights.mark_version(version)
            started.record_marked()
        else:
            await job.rollout.pause(self.pause)
            await job.weights.publish(version)
            started.record_published()

    async def _train_batch(self, job: Job, started: CompletionOrder, iteration: int) -> None:
        """Train a batch in completion order. What would lag too much is waited for, or dropped: then engines may start
        as many groups more."""
        if self.on_stale == "wait":
            return await job.trainer.train(iteration, first=started.due())
        if (overdue := started.overdue()) and (dropped := await job.prompts.drop(started_below=overdue)):
            limit = started.widen(dropped)
            await job.rollout.set_dispatch_limit(below=limit)
            await job.prompts.admit(below=limit)
        await job.trainer.train(iteration)
