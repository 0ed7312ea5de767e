"""Delayed parameter update: weights travel while engines generate, and each swaps them in between two batches."""

from dataclasses import dataclass

from schedules.base import Schedule, gather, train_handing_over
from schedules.protocol import Job, Rollout


@dataclass(frozen=True)
class DelayedUpdate(Schedule):
    """Each engine goes from batch to batch on its own, and swaps weights in between (AsyncFlow, arXiv 2507.01663,
    fig. 8c). Of an update only the trainer's copy and each engine's swap are exposed, not the transfer.

    Lag is 0 in the first iteration and exactly 1 in every later one: batch b is sampled by version b - 1 and no other.
    """

    transport = "host_staged"
    loads_between_batches = True
    eta = 1.0

    def lag_bounds(self, iteration: int) -> tuple[int, int]:
        return (1, 1) if iteration else (0, 0)

    async def run(self, job: Job) -> None:
        await gather(
            *(self._generate(job, engine) for engine in job.rollout.split()),
            *(stage.stream() for stage in job.stages),
            self._train(job),
        )

    async def _generate(self, job: Job, engine: Rollout) -> None:
        """Consumes prompts of one batch after another, produces samples. Waits for the version that a batch is due,
        which training of the batch two before unblocks, and for prompts, which admission supplies.

        It needs no dispatch limit: the engine that takes groups of batch b runs version b - 1, and all groups of the
        batch are below limit(b - 1) = (b + 1) * batch.
        """
        for b in range(job.iterations):
            if b >= 2:
                await job.weights.wait_arrived(b - 1)
                await job.weights.swap(engine, b - 1)
            await engine.generate(b)

    async def _train(self, job: Job) -> None:
        await train_handing_over(job, self.capacity(job))
        await job.weights.wait_arrived(job.iterations)  # nothing is under way when the run ends
