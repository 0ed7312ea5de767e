"""Who takes part in a weight transfer, which version each holds, and what may happen at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from harness.protocols import Span
from harness.runtime.handles import Handle, call_all
from harness.runtime.waits import Waits
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.wires import Spans, Wire

__all__ = ["Coordinator", "Wire"]


class Coordinator:
    """The weights of one job.

    trainers: the training ranks in order; engines: they take a version when the schedule says so; scorers: they take
    each as soon as it is there. At most one staged transfer is under way. Where one fails, its error is raised by
    every call from then on, and by `finish`: the run ends.
    """

    def __init__(
        self,
        trainers: Sequence[Handle],
        *,
        engines: Sequence[Handle],
        scorers: Sequence[Handle] = (),
        wire: Wire,
        bucket_bytes: int,
        observe: Callable[[Iterable[Span]], None],
    ) -> None:
        self.trainers, self.engines, self.scorers = list(trainers), list(engines), list(scorers)
        self.receivers = [*engines, *scorers]
        self.versions = {receiver.name: 0 for receiver in self.receivers}
        self.plan: TransferPlan | None = None
        self._wire, self._bucket_bytes, self._observe = wire, bucket_bytes, observe
        self.waits = Waits("weights")
        self._arrived = 0
        self._news = asyncio.Event()  # a version arrived, or a transfer ended; then there is a new one
        self._transfer: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Compute the plan and bring the wire up on all sides."""
        source, followers = self.trainers[0], self.trainers[1:]
        plan: TransferPlan = await source.call("plan", self._bucket_bytes)
        await call_all(followers, "follow", plan)
        await self._wire.connect(source, self.receivers, plan)
        self.plan = plan

    async def publish(self, version: int) -> None:
        """Bring the trained weights to every receiver as `version`.

        What a receiver took is its version from then on; a failure ends the run, with no receiver serving a mixture.
        """
        await self.finish()
        self._record(await self._wire.publish(self.trainers, self.receivers, version))
        self.versions = dict.fromkeys(self.versions, version)
        self._arrived = version

    async def stage(self, version: int) -> None:
        """Wait for the transfer before, copy the trained weights to the trainer's host memory, and let them travel.

        Returns when the copy is complete: then the trainer may change its weights.
        """
        await self.finish()
        self._record(await call_all(self.trainers, "publish", version))
        self._transfer = asyncio.create_task(self._carry(version))
        self._transfer.add_done_callback(lambda _: self._tell())

    async def arrived(self, version: int) -> None:
        """Wait until `version`, staged already or not, is in the host memory of every engine."""
        with self.waits("arrived", f"version {version} to be staged and to arrive"):
            while self._arrived < version and not self._failed:
                await self._news.wait()
        if self._failed:
            await self.finish()

    async def swap(self, handles: Sequence[Handle], version: int) -> None:
        """These receivers load `version` from their host memory, once it has arrived there."""
        await self.arrived(version)
        await self._swap(handles, version)

    async def finish(self) -> None:
        """Wait for the transfer under way, if any; raises its error, also when that was raised before."""
        if self._transfer is not None:
            with self.waits("finish", f"the transfer after version {self._arrived} to end"):
                await asyncio.shield(self._transfer)

    async def waiting(self) -> list[str]:
        """What waits here, a line each."""
        return self.waits.told()

    @property
    def _failed(self) -> bool:
        """Whether the last transfer ended, and not well."""
        transfer = self._transfer
        return transfer is not None and transfer.done() and (transfer.cancelled() or transfer.exception() is not None)

    async def _carry(self, version: int) -> None:
        """Consumes the trainer's host copy, produces the receivers'. Waits for all ends of the wire, which give up on
        each other by its timeout. What is busy computing answers late, and must not keep engines from their weights."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.trainers[0].call("arrived", version))
            tasks.create_task(self._to_engines(version))
            tasks.create_task(self._to_scorers(version))

    async def _to_engines(self, version: int) -> None:
        self._record(await call_all(self.engines, "stage", version))
        self._arrived = version
        self._tell()

    async def _to_scorers(self, version: int) -> None:
        self._record(await call_all(self.scorers, "stage", version))
        await self._swap(self.scorers, version)

    async def _swap(self, handles: Sequence[Handle], version: int) -> None:
        self._record(await call_all(handles, "swap", version))
        self.versions |= {handle.name: version for handle in handles}

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _record(self, spans: Spans) -> None:
        for part in spans:
            self._observe(part)
