"""Fully asynchronous streaming: every role has its own devices and lives off the queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from schedules.capacity import Capacity
from schedules.protocol import Job, Stage, Transport


@dataclass(frozen=True)
class FullyAsync:
    """Engines never wait for the trainer, except to take weights; the trainer never waits for a whole batch.

    max_staleness: iterations by which a group may be ahead of the weights that sample it; fractions allowed.
    partial: samples that run while weights arrive go on under the new ones (their tokens carry versions);
        otherwise engines first finish what they run.

    Worst lag of any token: ceil(max_staleness), by the dispatch rule (see `Capacity`) and group-ordered training.
    """

    transport: ClassVar[Transport] = "collective"
    max_staleness: float = 2.0
    partial: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.max_staleness <= 1_000_000:
            raise ValueError(f"schedule.max_staleness={self.max_staleness} is no bound; use 0 or more, at most 1000000")

    @property
    def eta(self) -> float:
        return self.max_staleness

    async def run(self, job: Job) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(job.rollout.stream())
            for stage in (*job.host_stages, *job.device_stages):
                loops.create_task(self._stream(stage, job.iterations))
            loops.create_task(self._train(job))

    async def _stream(self, stage: Stage, iterations: int) -> None:
        """Consumes a stage's inputs, produces its outputs; waits only for rows, which admission and engines supply."""
        for i in range(iterations):
            await stage.process(i)

    async def _train(self, job: Job) -> None:
        """Consumes trained columns, produces versions; each new version admits the next groups and unblocks engines."""
        capacity = Capacity(job.batch, self.eta)
        await job.prompts.admit(below=capacity.limit(0))
        await job.rollout.allow(below=capacity.limit(0))
        for version in range(1, job.iterations + 1):
            await job.trainer.train(version - 1)
            await job.rollout.pause(drain=not self.partial)
            await job.weights.publish(version)
            await job.rollout.resume(below=capacity.limit(version))
            await job.prompts.admit(below=capacity.limit(version))
