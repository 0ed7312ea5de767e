"""K steps off policy: a rollout batch of k training batches is generated while the one before is trained on."""

from dataclasses import dataclass

from schedules.base import Schedule, gather, option
from schedules.protocol import Job


@dataclass(frozen=True)
class KStepOff(Schedule):
    """Two pools that meet once every k iterations (AsyncFlow, arXiv 2507.01663, fig. 8b). Of k versions that the
    trainer makes in between, engines see the last.

    k: training batches in a rollout batch. With 1 it is `one_step_off`, call by call.

    Batch jk + r (0 <= r < k) lags by k + r at every token, and by r in the first rollout batch (j = 0): it is sampled
    by version (j - 1)k, the last one that engines got before rollout batch j, and trained at version jk + r.
    """

    transport = "collective"
    loads_between_batches = True
    k: int = option(2, least=1)

    @property
    def eta(self) -> float:
        return 2.0 * self.k - 1

    @property
    def cycle(self) -> int:
        return self.k

    def lag_bounds(self, iteration: int) -> tuple[int, int]:
        lag = iteration if iteration < self.k else self.k + iteration % self.k
        return lag, lag

    async def run(self, job: Job) -> None:
        capacity = self.capacity(job)
        await gather(job.prompts.admit(below=capacity.limit(0)), self._generate(job, 0))
        for first in range(0, job.iterations, self.k):
            end = min(first + self.k, job.iterations)
            admitted = job.prompts.admit(below=capacity.limit(first))
            await gather(admitted, self._generate(job, end), self._train(job, first, end))
            await job.weights.publish(end)

    async def _generate(self, job: Job, first: int) -> None:
        if first < job.iterations:
            await job.rollout.generate(first, batches=min(self.k, job.iterations - first))

    async def _train(self, job: Job, first: int, end: int) -> None:
        for i in range(first, end):
            await gather(*(stage.process(i) for stage in job.stages))
            await job.trainer.train(i)
            if i + 1 < end:
                await job.weights.mark_version(i + 1)
