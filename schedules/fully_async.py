"""Fully asynchronous streaming: every role has its own devices and lives off the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from schedules.capacity import Capacity
from schedules.protocol import Job, Order, Transport
from schedules.together import together


@dataclass(frozen=True)
class FullyAsync:
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

    transport: ClassVar[Transport] = "collective"
    least_engines: ClassVar[int] = 1
    max_staleness: float = 2.0
    partial: bool = True
    order: Order = "fifo"
    on_stale: Literal["drop", "wait"] = "wait"

    def __post_init__(self) -> None:
        if not 0 <= self.max_staleness <= 1_000_000:
            raise ValueError(f"schedule.max_staleness={self.max_staleness} is no bound; use 0 or more, at most 1000000")

    @property
    def eta(self) -> float:
        return self.max_staleness

    async def run(self, job: Job) -> None:
        await together(
            job.rollout.stream(),
            *(stage.stream() for stage in (*job.host_stages, *job.device_stages)),
            self._train(job),
        )

    async def _train(self, job: Job) -> None:
        """Consumes trained columns, produces versions; each new version admits the next groups and unblocks engines."""
        capacity = Capacity(job.batch, self.eta)
        limits = [capacity.limit(0)]  # the dispatch limit of every version, which tells what was started under it
        dropped = 0
        await job.prompts.admit(below=limits[0])
        await job.rollout.allow(below=limits[0])
        for version in range(1, job.iterations + 1):
            if self.order == "fifo":
                await job.trainer.train(version - 1)
            elif self.on_stale == "wait":
                await job.trainer.train(version - 1, first=self._due(limits, job.batch))
            else:
                dropped += await self._drop(job, limits)
                await job.trainer.train(version - 1)
            await job.rollout.pause(drain=not self.partial)
            await job.weights.publish(version)
            limits.append(capacity.limit(version) + dropped)
            await job.rollout.resume(below=limits[version])
            await job.prompts.admit(below=limits[version])
        await job.prompts.close()

    def _due(self, limits: list[int], batch: int) -> list[tuple[int, int]]:
        """What version u started is trained in iteration u + worst lag at the latest: so many groups from now."""
        worst, now = Capacity(batch, self.eta).worst_lag, len(limits) - 1
        return [(limits[u], (u + worst + 1 - now) * batch) for u in range(max(0, now - worst), now)]

    async def _drop(self, job: Job, limits: list[int]) -> int:
        """Drops what would lag too much in this iteration, and lets engines start as many groups more."""
        overdue = len(limits) - 1 - Capacity(job.batch, self.eta).worst_lag - 1
        dropped = await job.prompts.drop(started_below=limits[overdue]) if overdue >= 0 else 0
        if dropped:
            limits[-1] += dropped
            await job.rollout.allow(below=limits[-1])
            await job.prompts.admit(below=limits[-1])
        return dropped
