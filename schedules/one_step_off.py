"""One step off policy: the next batch is generated while the last one is trained on (verl's one_step_off_policy)."""

from dataclasses import dataclass

from schedules.base import Schedule, gather
from schedules.protocol import Job


@dataclass(frozen=True)
class OneStepOff(Schedule):
    """Two pools that meet once an iteration, when both are done: only there do weights move, and all wait for them.

    Lag is 0 in the first iteration and exactly 1 in every later one: batch i + 1 is sampled from its first to its last
    token by version i, while version i + 1 is being made of batch i.
    """

    transport = "collective"
    loads_between_batches = True
    eta = 1.0

    def lag_bounds(self, iteration: int) -> tuple[int, int]:
        return (1, 1) if iteration else (0, 0)

    async def run(self, job: Job) -> None:
        capacity = self.capacity(job)
        await gather(job.prompts.admit(below=capacity.limit(0)), self._generate(job, 0))
        for i in range(job.iterations):
            admitted = job.prompts.admit(below=capacity.limit(i))
            await gather(admitted, self._generate(job, i + 1), self._train(job, i))
            await job.weights.publish(i + 1)

    async def _generate(self, job: Job, i: int) -> None:
        if i < job.iterations:
            await job.rollout.generate(i)

    async def _train(self, job: Job, i: int) -> None:
        await gather(*(stage.process(i) for stage in job.stages))
        await job.trainer.train(i)
