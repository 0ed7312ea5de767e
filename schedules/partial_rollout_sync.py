"""Synchronous training on partial rollouts: more groups than a batch are begun, and the slow ones go on after it."""

import math
from dataclasses import dataclass

from schedules.base import Order, Schedule, gather, go_on, option
from schedules.capacity import Capacity, CompletionOrder
from schedules.protocol import Job


@dataclass(frozen=True)
class PartialRolloutSync(Schedule):
    """Every role shares one pool of devices, in turn, as in `colocate_sync`; but engines have more groups than a batch,
    and stop as soon as a batch of them is complete. The others go on from the tokens that they have after the update
    (APRIL, arXiv 2509.18521; partial rollouts of Kimi k1.5, arXiv 2501.12599).

    over: groups under way beyond a batch, as a share of it.
    max_staleness: iterations after which a group that was begun has to be trained; the batch waits for it then.

    Worst lag of any token: max_staleness, by the groups that each batch has to wait for (see `CompletionOrder`).
    """

    transport = "local"
    colocated = True
    loads_after_each_batch = True
    awaits_completion = True
    over: float = option(1.0, least=0, most=1_000_000)
    max_staleness: int = option(4, least=0, most=1_000_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness < math.ceil(self.over):
            raise ValueError(
                f"schedule.max_staleness={self.max_staleness}: schedule.over={self.over:g} begins more groups ahead "
                f"than are trained in so many iterations; set max_staleness={math.ceil(self.over)} or more"
            )

    @property
    def eta(self) -> float:
        return float(self.max_staleness if self.over else 0)

    @property
    def order(self) -> Order:
        return "completion" if self.over else "fifo"

    async def run(self, job: Job) -> None:
        await gather(job.rollout.stream(), *(stage.stream() for stage in job.stages), self._train(job))

    async def _train(self, job: Job) -> None:
        """Consumes trained columns, produces versions; each one unblocks engines, which unblock it by a batch."""
        started = CompletionOrder(Capacity(job.batch, self.over), self.max_staleness)
        for version in range(job.iterations):
            await go_on(job, version, started.limit)
            due = started.due() if self.over else []
            await job.rollout.completed(version, first=due)
            await job.rollout.pause("carry")
            await job.trainer.train(version, first=due)
            await job.weights.publish(version + 1)
            started.record_published()
        await go_on(job, job.iterations, started.limit)
        await job.prompts.close()
