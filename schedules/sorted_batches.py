"""Batches sorted by length: the responses of several batches are generated together, and the short ones train first."""

from dataclasses import dataclass
from typing import Literal

from schedules.base import Order, Schedule, gather, go_on, option
from schedules.protocol import Job


@dataclass(frozen=True)
class SortedBatches(Schedule):
    """Every role shares one pool of devices, in turn. The groups of several batches are begun at once; as soon as a
    batch of them is complete engines stop, it is trained, and the others go on under its weights, until none of them is
    left: no prompt is passed over for being slow (SortedRL, arXiv 2603.23414).

    batches: that are begun at once.
    pause: what becomes of the others. carry: they go on from the tokens that they have; abort: they begin again, so
        that only groups of which some samples were done lag.

    Worst lag of any token: batches - 1, as each of them is trained before the next are begun.
    """

    transport = "local"
    colocated = True
    loads_after_each_batch = True
    awaits_completion = True
    batches: int = option(4, least=1, most=1_000_000)
    pause: Literal["carry", "abort"] = option(
        "carry", read_where=("schedule.batches is above 1", lambda own: own.batches > 1)
    )

    @property
    def eta(self) -> float:
        return self.batches - 1.0

    @property
    def order(self) -> Order:
        return "completion" if self.batches > 1 else "fifo"

    @property
    def cycle(self) -> int:
        return self.batches

    def lag_bounds(self, iteration: int) -> tuple[int, int]:
        return 0, iteration % self.batches

    async def run(self, job: Job) -> None:
        await gather(job.rollout.stream(), *(stage.stream() for stage in job.stages), self._train(job))

    async def _train(self, job: Job) -> None:
        """Consumes trained columns, produces versions; each one unblocks engines, which unblock it by a batch."""
        limit = 0
        for version in range(job.iterations):
            if version % self.batches == 0:
                limit = (version + self.batches) * job.batch
            await go_on(job, version, limit)
            await job.rollout.completed(version)
            await job.rollout.pause(self.pause)
            await job.trainer.train(version)
            await job.weights.publish(version + 1)
        await go_on(job, job.iterations, limit)
        await job.prompts.close()
