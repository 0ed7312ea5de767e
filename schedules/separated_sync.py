"""Separated synchronous training: a pool of devices per role, and nobody ahead of anybody."""

from dataclasses import dataclass

from schedules.base import Schedule, gather, option
from schedules.protocol import Job


@dataclass(frozen=True)
class SeparatedSync(Schedule):
    """Generate a batch, score it, train on it, broadcast the weights; the next batch begins under them.

    streaming: every role takes the rows of the batch as they become ready, so that scoring and training overlap with
        generation; otherwise each waits for the whole batch of the one before. AsyncFlow (arXiv 2507.01663) calls
        the step from one to the other "+ TransferQueue".

    Lag is 0 at every token: batch i is admitted, sampled and trained while version i is the only one there is.
    """

    transport = "collective"
    loads_between_batches = True
    eta = 0.0
    streaming: bool = option(True)

    async def run(self, job: Job) -> None:
        capacity = self.capacity(job)
        for i in range(job.iterations):
            batch = job.prompts.admit(below=capacity.limit(i)), job.rollout.generate(i)
            if self.streaming:
                await gather(*batch, self._score(job, i), job.trainer.train(i))
            else:
                await gather(*batch)
                await self._score(job, i)
                await job.trainer.train(i)
            await job.weights.publish(i + 1)

    async def _score(self, job: Job, i: int) -> None:
        await gather(*(stage.process(i) for stage in job.stages))
