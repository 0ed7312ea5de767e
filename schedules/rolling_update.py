"""Rolling updates: each engine takes the newest weights by itself, so that several versions sample at the same time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from schedules.base import Schedule, gather, option, train_handing_over
from schedules.protocol import Job, PauseMode, Rollout


@dataclass(frozen=True)
class RollingUpdate(Schedule):
    """Weights wait in host memory, and an engine takes the newest of them when its turn comes, whichever the others
    hold; versions that came in between it never has (Laminar, arXiv 2510.12633; DORA, arXiv 2604.26256). The trainer
    waits for no engine.

    max_staleness: iterations by which a group may be ahead of the weights that sample it; fractions allowed.
    updating: share of the engines that may be at it at the same time, one at least.
    pause: what becomes of samples that run on an engine as its turn comes. wait: it first finishes them, so that each
        is of one version; keep: they go on under new weights (their tokens carry versions); abort: they begin again.

    Worst lag of any token: ceil(max_staleness), by the dispatch rule of each engine (see `Capacity`) and group-ordered
    training.
    """

    transport = "host_staged"
    follows_time = True
    max_staleness: float = option(2.0, least=0, most=1_000_000)
    updating: float = option(0.25, least=0, most=1, examples=(0.0, 0.5, 1.0))
    pause: PauseMode = option(
        "wait", read_where=("schedule.max_staleness is above 0", lambda own: own.max_staleness > 0)
    )

    @property
    def eta(self) -> float:
        return self.max_staleness

    async def run(self, job: Job) -> None:
        engines = job.rollout.split()
        turns = max(1, math.floor(self.updating * len(engines)))
        await gather(
            job.rollout.stream(),
            *(stage.stream() for stage in job.stages),
            *(self._update(job, engines[k::turns]) for k in range(turns)),
            self._train(job),
        )

    async def _update(self, job: Job, engines: Sequence[Rollout]) -> None:
        """Consumes versions that arrived, produces engines that run them, one after the other, round and round; a wider
        dispatch limit unblocks each. Waits for arrival, which training unblocks, and, where pause is wait, for running
        samples to end."""
        capacity, held = self.capacity(job), [0] * len(engines)
        while (oldest := min(held)) < job.iterations:
            k = held.index(oldest)
            await job.weights.wait_arrived(oldest + 1)
            await engines[k].pause(self.pause)
            held[k] = await job.weights.swap_newest(engines[k])
            await engines[k].resume(below=capacity.limit(held[k]))

    async def _train(self, job: Job) -> None:
        await job.rollout.set_dispatch_limit(below=self.capacity(job).limit(0))
        await train_handing_over(job, self.capacity(job))
