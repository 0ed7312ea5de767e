"""Adaptive staleness: as fully asynchronous as keeps the trainer busy, and no more."""

from dataclasses import dataclass

from schedules.base import Schedule, gather, go_on, option
from schedules.capacity import Capacity
from schedules.protocol import Job, PauseMode


@dataclass(frozen=True)
class AdaptiveStaleness(Schedule):
    """`fully_async`, whose staleness begins at 0 and follows what was measured: where the trainer waited for samples in
    the batch before, groups may be further ahead of the weights, and else a little less far (our own). At rest it has
    waited in a share `idle` of the batches.

    max_staleness: iterations that they may be ahead at most; fractions allowed.
    idle: share of a batch's time that the trainer may wait.
    step: iterations by which the staleness grows after a batch in which it waited longer; `idle` of that is what it
        shrinks by after another one.
    pause: what becomes of samples that run when weights arrive, as in `fully_async`.

    Worst lag of any token: ceil(max_staleness), by the dispatch rule of the staleness of each version (see `Capacity`)
    and group-ordered training. Limits never fall, as the staleness shrinks by less than an iteration.
    """

    transport = "collective"
    follows_time = True
    max_staleness: float = option(4.0, least=0, most=1_000_000)
    idle: float = option(0.05, least=0, most=1)
    step: float = option(0.25, least=0, most=1)
    pause: PauseMode = option(
        "keep", read_where=("schedule.max_staleness is above 0", lambda own: own.max_staleness > 0)
    )

    @property
    def eta(self) -> float:
        return self.max_staleness

    async def run(self, job: Job) -> None:
        await gather(job.rollout.stream(), *(stage.stream() for stage in job.stages), self._train(job))

    async def _train(self, job: Job) -> None:
        """Consumes trained columns, produces versions; each admits the next groups and unblocks engines."""
        staleness = 0.0
        for version in range(job.iterations):
            limit = Capacity(job.batch, staleness).limit(version)
            await gather(go_on(job, version, limit), job.trainer.train(version))
            staleness = self._next(staleness, job.trainer.waited)
            await job.rollout.pause(self.pause)
            await job.weights.publish(version + 1)
        await go_on(job, job.iterations, Capacity(job.batch, staleness).limit(job.iterations))
        await job.prompts.close()

    def _next(self, staleness: float, waited: float) -> float:
        if waited > self.idle:
            return min(self.max_staleness, staleness + self.step)
        return max(0.0, staleness - self.step * self.idle)
