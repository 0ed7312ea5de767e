"""Half a step off policy: cohorts of engines take new weights in turn, so that rollout as a whole never stops."""

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.base import Schedule, gather, option, train_handing_over
from schedules.protocol import Job, PauseMode, Rollout


@dataclass(frozen=True)
class HalfStep(Schedule):
    """The staggered `delayed_update`: while one cohort swaps, the others generate under the version that they have
    (AsyncFlow, arXiv 2507.01663, fig. 8d, as future work). A batch holds samples of two versions.

    cohorts: into how many parts the engines are dealt out; at most one of them is paused at any time.
    pause: what becomes of samples that run when weights are swapped. keep: they go on under the new ones (their tokens
        carry versions); wait: a cohort first finishes them; abort: they begin again under the new ones.

    Lag is 0 or 1, and 0 in the second half of every batch, which no engine may start under the version before: so at
    most ceil(batch / 2) groups of a batch lag.
    """

    transport = "host_staged"
    eta = 0.5
    cohorts: int = option(2, least=2)
    pause: PauseMode = option("keep")

    @property
    def least_engines(self) -> int:
        return self.cohorts

    async def run(self, job: Job) -> None:
        await gather(
            job.rollout.stream(),
            *(stage.stream() for stage in job.stages),
            self._update(job, job.rollout.split(self.cohorts)),
            self._train(job),
        )

    async def _update(self, job: Job, cohorts: Sequence[Rollout]) -> None:
        """Consumes versions that arrived, produces engines that run them; a wider dispatch limit unblocks these.
        Waits for arrival, which training unblocks, and, where pause is wait, for running samples to end."""
        capacity = self.capacity(job)
        for version in range(1, job.iterations + 1):
            await job.weights.wait_arrived(version)
            for cohort in cohorts:
                await cohort.pause(self.pause)
                await job.weights.swap(cohort, version)
                await cohort.resume(below=capacity.limit(version))

    async def _train(self, job: Job) -> None:
        await job.rollout.set_dispatch_limit(below=self.capacity(job).limit(0))
        await train_handing_over(job, self.capacity(job))
