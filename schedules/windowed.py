"""Windowed first-in first-out: groups overtake each other, but none is overtaken from beyond a window."""

import math
from dataclasses import dataclass

from schedules.base import Order, Schedule, gather, go_on, option
from schedules.capacity import Capacity
from schedules.protocol import Job, PauseMode


@dataclass(frozen=True)
class Windowed(Schedule):
    """`fully_async` that trains groups as they are completed, but only those that are no further than a window from the
    oldest untrained one, which is waited for at its end (MiniMax's Forge). Nothing is dropped.

    max_staleness: iterations by which a group may be ahead of the weights that sample it; fractions allowed.
    window: batches by which a group may be ahead of the oldest untrained one; fractions allowed. Forge's W is a batch
        of groups times this, and one.
    pause: what becomes of samples that run when weights arrive, as in `fully_async`.

    Worst lag of any token: ceil(max_staleness + window), as fewer groups than a window overtake one; and 0 without
    staleness.
    """

    transport = "collective"
    max_staleness: float = option(1.5, least=0, most=1_000_000)
    window: float = option(
        0.5,
        least=0,
        most=1_000_000,
        read_where=("schedule.max_staleness is above 0", lambda own: own.max_staleness > 0),
    )
    pause: PauseMode = option(
        "keep", read_where=("schedule.max_staleness is above 0", lambda own: own.max_staleness > 0)
    )

    @property
    def eta(self) -> float:
        return self.max_staleness + self.window if self.max_staleness else 0.0

    @property
    def order(self) -> Order:
        return "completion" if self.max_staleness and self.window else "fifo"

    def window_groups(self, batch: int) -> int | None:
        return 1 + math.floor(round(self.window * batch, 9)) if self.order == "completion" else None

    def capacity(self, job: Job) -> Capacity:
        return Capacity(job.batch, self.max_staleness)

    async def run(self, job: Job) -> None:
        await gather(job.rollout.stream(), *(stage.stream() for stage in job.stages), self._train(job))

    async def _train(self, job: Job) -> None:
        """Consumes trained columns, produces versions; each admits the next groups and unblocks engines."""
        capacity = self.capacity(job)
        for version in range(job.iterations):
            await gather(go_on(job, version, capacity.limit(version)), job.trainer.train(version))
            await job.rollout.pause(self.pause)
            await job.weights.publish(version + 1)
        await go_on(job, job.iterations, capacity.limit(job.iterations))
        await job.prompts.close()
