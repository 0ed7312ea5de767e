"""K steps off policy: a rollout batch of k training batches is generated while the one before is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from schedules.capacity import Capacity
from schedules.protocol import Job, Order, Transport
from schedules.together import together


@dataclass(frozen=True)
class KStepOff:
    """Two pools that meet once every k iterations (AsyncFlow, arXiv 2507.01663, fig. 8b). Of k versions that the
    trainer makes in between, engines see the last.

    k: training batches in a rollout batch. With 1 it is `one_step_off`, call by call.

    Batch jk + r (0 <= r < k) lags by k + r at every token, and by r in the first rollout batch (j = 0): it is sampled
    by version (j - 1)k, the last one that engines got before rollout batch j, and trained at version jk + r.
    """

    transport: ClassVar[Transport] = "collective"
    order: ClassVar[Order] = "fifo"
    least_engines: ClassVar[int] = 1
    k: int = 2

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"schedule.k={self.k} is no number of training batches; use 1 or more")

    @property
    def eta(self) -> float:
        return 2.0 * self.k - 1

    async def run(self, job: Job) -> None:
        capacity = Capacity(job.batch, self.eta)
        await job.prompts.admit(below=capacity.limit(0))
        await self._generate(job, 0)
        for first in range(0, job.iterations, self.k):
            end = min(first + self.k, job.iterations)
            await together(self._generate(job, end), self._train(job, first, end))
            await job.weights.publish(end)
            await job.prompts.admit(below=capacity.limit(end))

    async def _generate(self, job: Job, first: int) -> None:
        if first < job.iterations:
            await job.rollout.generate(first, batches=min(self.k, job.iterations - first))

    async def _train(self, job: Job, first: int, end: int) -> None:
        for i in range(first, end):
            await together(*(stage.process(i) for stage in (*job.host_stages, *job.device_stages)))
            await job.trainer.train(i)
            if i + 1 < end:
                await job.weights.keep(i + 1)
