"""Colocated synchronous training: every role shares one pool of devices, in turn."""

from dataclasses import dataclass

from schedules.base import Schedule, gather
from schedules.protocol import Job


@dataclass(frozen=True)
class ColocateSync(Schedule):
    """Generate a batch, free the devices, then rewards, reference and old log-probs, then the update; engines then take
    the weights from the trainer on the same device. Engines wake and ask for groups while these are admitted.

    Lag is 0 at every token: batch i is admitted, sampled and trained while version i is the only one there is.
    """

    transport = "local"
    loads_between_batches = True
    colocated = True
    loads_after_each_batch = True
    eta = 0.0

    async def run(self, job: Job) -> None:
        capacity = self.capacity(job)
        for i in range(job.iterations):
            await gather(job.prompts.admit(below=capacity.limit(i)), job.rollout.generate(i))
            await gather(*(stage.process(i) for stage in job.stages))
            await job.trainer.train(i)
            await job.weights.publish(i + 1)
