"""The rollout engines as a schedule sees them: some may be lost over what they are asked, and others come in."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from harness.driver.pool import Observer, Pool
from harness.runtime.runtime import Handle, death_in
from harness.weight_sync.membership import Fleet


class RolloutPool(Pool):
    """All rollout engines that work, or those of a cohort: the `fleet` knows which.

    Where one dies over a call, the fleet decides whether the run goes on. Then what it had is in the queue again, and
    the others, of whatever cohort, are asked for the same once more.
    """

    def __init__(
        self,
        fleet: Fleet,
        observer: Observer,
        name: str = "rollout",
        *,
        among: Collection[str] | None = None,
        whole: RolloutPool | None = None,
    ) -> None:
        super().__init__(name, (), observer)
        self.fleet = fleet
        self._among, self._whole = among, whole or self
        self._cohorts: list[RolloutPool] = []
        self._newest: dict[str, int] = {}  # batch that each engine was asked to generate
        self._streams: asyncio.TaskGroup | None = None  # while engines stream
        self._streaming: set[str] = set()
        self._lost_a_stream = False

    @property
    def workers(self) -> list[Handle]:
        return [worker for worker in self.fleet.working if self._among is None or worker.name in self._among]

    def split(self, cohorts: int | None = None) -> Sequence[RolloutPool]:
        names = [worker.name for worker in self.workers]
        count = len(names) if cohorts is None else cohorts
        if not 1 <= count <= len(names):
            raise ValueError(f"{len(names)} rollout engines cannot be split into {count} cohorts")
        made = [
            RolloutPool(self.fleet, self.observer, f"{self.name} {k}", among=names[k::count], whole=self)
            for k in range(count)
        ]
        self._cohorts += made
        return made

    def ask_spans(self) -> None:
        super().ask_spans()
        for cohort in self._cohorts:
            cohort.ask_spans()

    async def generate(self, iteration: int, batches: int = 1) -> None:
        what = f"batch {iteration}" if batches == 1 else f"batches {iteration} to {iteration + batches - 1}"
        self.observer.doing(self.name, what)
        await self._long(self._generate(iteration, batches))
        self.observer.doing(self.name, f"done with {what}")

    async def stream(self) -> None:
        await self._long(self._stream())
        self.observer.doing(self.name, "done")

    async def set_dispatch_limit(self, below: int) -> None:
        self.observer.doing(self.name, f"up to group {below - 1}")
        await self._ask_all(self.workers, "set_dispatch_limit", below)

    async def pause(self, *, drain: bool) -> None:
        self.observer.doing(self.name, "draining" if drain else "paused for weights")
        await self._ask_all(self.workers, "pause", drain)

    async def resume(self, below: int) -> None:
        await self._ask_all(self.workers, "resume", below)
        self._whole.start_streams(self.workers)
        self.observer.doing(self.name, f"up to group {below - 1}")

    def start_streams(self, workers: Sequence[Handle]) -> None:
        """While engines stream: these do so, too. They have weights and a dispatch limit."""
        if self._streams is not None and self._streaming:
            for worker in workers:
                self._start_stream(self._streams, worker)

    async def _generate(self, iteration: int, batches: int) -> None:
        """Whoever is not as far as this batch yet takes what a dead one left when it comes to it: not before, for it
        may hold weights that are too old."""
        newest, workers = self._whole._newest, self.workers
        newest |= {worker.name: iteration for worker in workers}
        while not await self._ask_all(workers, "generate", iteration, batches):
            workers = [worker for worker in self._whole.workers if newest.get(worker.name, -1) >= iteration]

    async def _stream(self) -> None:
        """Until all streams ended: also those of engines that came in meanwhile, and of those that took over what
        another one had when it died."""
        self._lost_a_stream = True
        while self._lost_a_stream:
            self._lost_a_stream = False
            async with asyncio.TaskGroup() as streams:
                self._streams = streams
                for worker in self.workers:
                    self._start_stream(streams, worker)
        self._streams = None

    def _start_stream(self, streams: asyncio.TaskGroup, worker: Handle) -> None:
        if worker.name not in self._streaming:
            self._streaming.add(worker.name)
            streams.create_task(self._stream_of(worker))

    async def _stream_of(self, worker: Handle) -> None:
        try:
            if not await self._ask(worker, "stream"):
                self._lost_a_stream = True
        finally:
            self._streaming.discard(worker.name)

    async def _call(self, method: str, *arguments: Any) -> None:
        await self._ask_all(self.workers, method, *arguments)

    async def _ask_all(self, workers: Sequence[Handle], method: str, *arguments: Any) -> bool:
        """The same of every one of them; whether all did it."""
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._ask(worker, method, *arguments)) for worker in workers]
        return all(task.result() for task in asked)

    async def _ask(self, worker: Handle, method: str, *arguments: Any) -> bool:
        """Whether it did what it was asked; False where it died over it, and the run goes on. Then what it had can be
        taken by others. Raises LostEngine where the run is to end."""
        try:
            spans = await worker.call(method, *arguments)
        except Exception as error:
            if (death := death_in(error)) is None:
                raise
            await self.fleet.lose({worker.name: _told(worker, method, death)})
            return False
        self.observer.spans(spans or ())
        return True


def _told(worker: Handle, method: str, death: Exception) -> str:
    """Who died over what."""
    told = str(death)
    return told if told.startswith(worker.name) else f"{worker.name} died during {method}: {told}"
