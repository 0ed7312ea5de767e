"""Who takes part in a weight transfer, which version each holds, and the order of calls of each transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from harness.protocols import Span
from harness.runtime.handles import Handle, call_all
from harness.weight_sync.plan import TransferPlan

Transport = Literal["collective", "ipc"]


class Coordinator:
    """The weights of one job. `trainers` are the training ranks in order, `receivers` all that take versions."""

    def __init__(
        self,
        trainers: Sequence[Handle],
        receivers: Sequence[Handle],
        *,
        transport: Transport,
        host: str,
        bucket_bytes: int,
        timeout_s: float,
        observe: Callable[[Iterable[Span]], None],
    ) -> None:
        self.trainers, self.receivers = list(trainers), list(receivers)
        self.transport, self.host = transport, host
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self.versions = {receiver.name: 0 for receiver in self.receivers}
        self._observe = observe
        self.plan: TransferPlan | None = None

    async def connect(self) -> None:
        """Compute the plan and bring the transport up on all sides."""
        source, followers = self.trainers[0], self.trainers[1:]
        plan: TransferPlan = await source.call("plan", self.bucket_bytes)
        await call_all(followers, "follow", plan)
        if self.transport == "ipc":
            offer = await source.call("open_shared", plan)
            try:
                await self._join(offer)
            finally:
                offer.path.unlink()  # all have it mapped, or the run ends: either way nothing may stay behind
        else:
            offer = await source.call("open_collective", plan, self.host, len(self.receivers), self.timeout_s)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(source.call("join_collective"))
                tasks.create_task(self._join(offer))
        self.plan = plan

    async def publish(self, version: int) -> None:
        """Bring the trained weights to every receiver as `version`.

        Through shared memory the trainer writes first and receivers read after; a collective has both at once. What a
        receiver took is its version from then on; a failure ends the run, with no receiver serving a mixture.
        """
        if self.transport == "ipc":
            spans = await call_all(self.trainers, "publish", version)
            spans += await call_all(self.receivers, "load", version)
        else:
            async with asyncio.TaskGroup() as tasks:
                sent = tasks.create_task(call_all(self.trainers, "publish", version))
                received = tasks.create_task(call_all(self.receivers, "load", version))
            spans = sent.result() + received.result()
        for part in spans:
            self._observe(part)
        self.versions = dict.fromkeys(self.versions, version)

    async def _join(self, offer: object) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, receiver in enumerate(self.receivers):
                tasks.create_task(receiver.call("join", offer, number))
