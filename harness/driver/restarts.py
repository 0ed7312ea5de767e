"""Roles that died and are started again (docs/faults.md): how often they may be, and those that can be where they were.

What a role of the host does is a function of rows in the queue: its worker is started anew, the queue gives back what
the dead one had taken and not answered, and it is asked the same once more. So no sample knows of it.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from harness.metrics.schemas import Restart
from harness.protocols import Clock
from harness.runtime.runtime import Handle, Runtime, WorkerDied, death_in
from harness.transfer_queue import TransferQueue
from harness.weight_sync.coordinator import Coordinator, NotBrought
from harness.weight_sync.membership import LostEngine
from harness.workers.dataflow import partition_name
from schedules import Order

Answer = TypeVar("Answer")


class GivenUp(WorkerDied):
    """Roles died that had been started again as often as the settings allow, so that the run ends."""


class Restarts:
    """The restarts of one command: each set of roles that dies together may be started again `limit` times."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._counts = Counter[str]()

    def allow(self, roles: Iterable[str]) -> bool:
        """Whether they may once more."""
        return self._counts[_together(roles)] < self.limit

    def count(self, roles: Iterable[str]) -> None:
        """Count that these roles were started again, or that it was tried."""
        self._counts[_together(roles)] += 1

    @property
    def used_up(self) -> str:
        """The end of the message on what died once more."""
        return f"it was started again {self.limit} times before (restarts.limit={self.limit})"


def _together(roles: Iterable[str]) -> str:
    return ", ".join(sorted(roles))


class CarryOut(Protocol):
    """A way to have calls of one worker carried out."""

    async def __call__(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer of a call."""


async def once(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer of a call to a worker that cannot be started again."""
    return await call()


class WorkerRestarts:
    """Restarts of one worker: `handles` are on all of its roles, none of which remembers anything. hear: is told of
    each."""

    def __init__(
        self,
        handles: Sequence[Handle[Any]],
        restarts: Restarts,
        runtime: Runtime,
        queue: TransferQueue,
        clock: Clock,
        hear: Callable[[Restart], None],
    ) -> None:
        self._handles, self._restarts, self._runtime = handles, restarts, runtime
        self._queue, self._clock, self._hear = queue, clock, hear
        self._starting = asyncio.Lock()
        self._number = 0  # of its process

    async def carried_out(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Answer of a call; one over which the worker dies is made again, to the next one. Raises GivenUp."""
        while True:
            async with self._starting:
                number = self._number
            try:
                return await call()
            except Exception as error:
                if (death := death_in(error)) is None:
                    raise
                await self._start_again(number, death)

    async def _start_again(self, number: int, death: Exception) -> None:
        """Once, however many calls met the death of this one."""
        async with self._starting:
            if number != self._number:
                return
            began, names = self._clock.now(), [handle.name for handle in self._handles]
            await started_again(self._handles[0], names, death, self._restarts, self._runtime)
            await self._queue.waiting()  # once this is answered, the queue has read all that the dead one had written
            for name in names:
                await self._queue.release(name)
            self._number += 1
            now = self._clock.now()
            self._hear(Restart(names, how(death), "started again", round(began, 3), round(now - began, 3)))


class EngineRestarts:
    """Restarts of rollout engines, each alone in its worker. They hold the newest weights when they are at work again.

    Counted are those that came of it, or failed by the engine: a death after which all go back is counted there.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        restarts: Restarts,
        runtime: Runtime,
        clock: Clock,
        hear: Callable[[Restart], None],
        lacks_samples: Callable[[int], Awaitable[bool]],
    ) -> None:
        """lacks_samples: waits until this batch needs an engine to sample some of it, or all of it was sampled; whether
        it does."""
        self._coordinator, self._restarts, self._runtime = coordinator, restarts, runtime
        self._clock, self._hear, self._lacks_samples = clock, hear, lacks_samples

    async def replace(self, engine: Handle[Any], why: str) -> int | None:
        """See `harness.weight_sync.membership.Replace`."""
        began, death = self._clock.now(), why
        while self._restarts.allow([engine.name]):
            await self._coordinator.ended()
            try:
                version = await self._started(engine)
            except NotBrought as error:
                self._restarts.count([engine.name])
                death = str(error)
                continue
            self._restarts.count([engine.name])
            done = f"started again with version {version}"
            self._hear(Restart([engine.name], how(death), done, round(began, 3), round(self._clock.now() - began, 3)))
            return version
        return None

    async def _started(self, engine: Handle[Any]) -> int:
        """The version that it then holds. Raises NotBrought."""
        try:
            await self._runtime.start_again(engine)
        except Exception as error:
            if (death := death_in(error)) is None:
                raise
            raise NotBrought(str(death)) from error
        return await self._coordinator.bring(engine, self._settled)

    async def _settled(self) -> int:
        """Version of the trainer's weights, once they are of one. Raises LostEngine where that cannot be."""
        trainer = self._coordinator.trainers[0].role
        async with asyncio.TaskGroup() as tasks:
            stuck = tasks.create_task(self._stuck())
            version = await trainer.settled_version()
            stuck.cancel()
        return version

    async def _stuck(self) -> None:
        """Raises LostEngine once training, between two steps of a batch, waits for samples that nobody is left to make:
        the weights that could make them are no more."""
        fleet = self._coordinator.fleet
        batch = await self._coordinator.trainers[0].role.open_batch()
        await fleet.none_works()
        if await self._lacks_samples(batch):
            deaths = "; ".join(member.trouble for member in fleet.membership.members if member.health == "lost")
            raise LostEngine(
                f"{deaths}; no engine was left to sample the rest of batch {batch}, of which optimizer steps were made "
                f"already: weights of version {batch} are no more"
            )


async def lacks_samples(queue: TransferQueue, order: Order, group_size: int, batch: int) -> bool:
    """See `EngineRestarts`; of a queue that no engine reads. Where groups are trained as they are completed, any that
    is not sampled counts: of the batch is whichever is completed next."""
    partition = partition_name(batch) if order == "fifo" else None
    return await queue.get("rollout", group_size, partition=partition, consumer="restarts") is not None


async def started_again(
    handle: Handle[Any], roles: Sequence[str], death: Exception, restarts: Restarts, runtime: Runtime
) -> None:
    """The worker of this role, which has these. Raises GivenUp where it dies as it starts, again and again."""
    while True:
        if not restarts.allow(roles):
            why = str(death) if not restarts.limit else f"{death}; {restarts.used_up}"
            raise GivenUp(why) from death
        restarts.count(roles)
        try:
            return await runtime.start_again(handle)
        except Exception as error:
            if (again := death_in(error)) is None:
                raise
            death = again


_OUTPUT = re.compile(r"; its output is in [^;]*")
_ROLE = re.compile(r"\b[a-z_]+\[\d+\]")


def how(death: Exception | str) -> str:
    """A death in one line; where its output is is for the line that ends a run."""
    return _OUTPUT.sub("", str(death).splitlines()[0])


def roles_in(message: str) -> list[str]:
    """Roles that a message about deaths names; the queue where it names none."""
    return sorted(set(_ROLE.findall(_OUTPUT.sub("", message)))) or ["queue"]
