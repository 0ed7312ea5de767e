"""Colocated synchronous training: every role shares one pool of devices, in turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from schedules.capacity import Capacity
from schedules.protocol import Job, Transport


@dataclass(frozen=True)
class ColocateSync:
    """Generate a batch, free the devices, then reference and old log-probs, then the update, then copy the weights.

    Lag is 0 at every token: batch i is admitted, sampled and trained while version i is the only one there is.
    """

    transport: ClassVar[Transport] = "ipc"
    eta: ClassVar[float] = 0.0

    async def run(self, job: Job) -> None:
        capacity = Capacity(job.batch, self.eta)
        for i in range(job.iterations):
            await job.prompts.admit(below=capacity.limit(i))
            await job.rollout.generate(i)
            async with asyncio.TaskGroup() as tasks:
                for stage in job.host_stages:  # rewards and advantages need no device, so they wait for no turn
                    tasks.create_task(stage.process(i))
                for stage in job.device_stages:
                    await stage.process(i)
            await job.trainer.train(i)
            await job.weights.publish(i + 1)
