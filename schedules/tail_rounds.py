"""Synchronous training whose slow groups are put off, and generated together in rounds of their own."""

import math
from dataclasses import dataclass

from schedules.base import Order, Schedule, gather, option
from schedules.capacity import Capacity
from schedules.protocol import Job


@dataclass(frozen=True, slots=True)
class Rounds(Capacity):
    """The groups of a job that may be begun in each round. ahead: that a short one begins; groups: of the job."""

    ahead: int
    groups: int

    def range(self, version: int) -> tuple[int, int]:
        """The first group that may be begun in the round of this version, and the one after the last: new ones, or, in
        a tail round, what was put off, a batch of it; at the end of the job all that is left."""
        batch, before, end = self.batch, 0, 0
        for trained in range(0, (version + 1) * batch, batch):
            before = end
            if before - trained < batch:
                end = min(before + self.ahead, trained + 2 * batch, self.groups)
        return (before if self.ahead > batch <= end - before else 0), end

    def limit(self, version: int) -> int:
        """A dispatch limit that is above that of the round before, also where nothing is new: so what begins again was
        started under this one."""
        return self.range(version)[1] + version


@dataclass(frozen=True)
class TailRounds(Schedule):
    """Every role shares one pool of devices, in turn, as in `colocate_sync`. In a short round more groups than a batch
    are begun, and engines stop as soon as a batch is complete; the others are put off. Once a batch of those has come
    together, they begin again in a round of their own, a tail round (RollPacker, arXiv 2509.21009).

    over: groups that a short round begins beyond a batch, as a share of it.

    Worst lag of any token: 1, of a group that was complete as engines stopped and was not trained.
    """

    transport = "local"
    colocated = True
    loads_after_each_batch = True
    awaits_completion = True
    puts_off = True
    over: float = option(0.25, least=0, most=1)

    @property
    def eta(self) -> float:
        return 1.0 if self.over else 0.0

    @property
    def order(self) -> Order:
        return "completion" if self.over else "fifo"

    def capacity(self, job: Job) -> Rounds:
        return Rounds(job.batch, self.eta, Capacity(job.batch, self.over).limit(0), job.batch * job.iterations)

    def lag_bounds(self, iteration: int) -> tuple[int, int]:
        return 0, min(iteration, math.ceil(self.over))

    async def run(self, job: Job) -> None:
        await gather(job.rollout.stream(), *(stage.stream() for stage in job.stages), self._train(job))

    async def _train(self, job: Job) -> None:
        """Consumes trained columns, produces versions; each one unblocks engines, which unblock it by a batch."""
        rounds, limit = self.capacity(job), 0
        for version in range(job.iterations):
            complete = [(limit, job.batch)] if self.over and version else []  # before this round
            (first, end), limit = rounds.range(version), rounds.limit(version)
            if version:
                await job.rollout.resume(below=limit, above=first)
            else:
                await job.rollout.set_dispatch_limit(below=limit)
            await job.prompts.admit(below=end)
            await job.rollout.completed(version, first=complete)
            await job.rollout.put_off()
            await job.trainer.train(version, first=complete)
            await job.weights.publish(version + 1)
        await job.rollout.resume(below=limit)
        await job.prompts.close()
