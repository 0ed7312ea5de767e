"""The same queue across processes: a LocalQueue inside a Ray actor, and the client that every process may hold.

One actor call per put and per get; payloads travel as NumPy buffers (pickle protocol 5, out of band). Everybody in a
Ray cluster can run code on it, so there is no other trust domain here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from harness.transfer_queue.columns import Batch, Column, as_integers
from harness.transfer_queue.control.asks import First
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.queue import Portal
from harness.transfer_queue.spec import QueueSpec

CONCURRENT_CALLS = 4096
"""Calls the actor may hold at a time: a parked get holds one, and must never keep a put out."""


class QueueHost(LocalQueue):
    """The actor. All its methods run in its event loop, one at a time between awaits."""

    def __init__(self, spec: QueueSpec) -> None:
        super().__init__(spec)
        self._asking: dict[str, asyncio.Task[Batch | None]] = {}
        self._answered: deque[tuple[str, int]] = deque(maxlen=CONCURRENT_CALLS)  # ticket and lease, the latest ones

    async def get_for(self, ticket: str, task: str, count: int, **options: Any) -> Batch | None:
        """A `get` that its reader may withdraw. None if it did."""
        self._asking[ticket] = asyncio.ensure_future(self.get(task, count, **options))
        try:
            batch = await self._asking[ticket]
        except asyncio.CancelledError:
            return None
        finally:
            del self._asking[ticket]
        if batch is not None:
            self._answered.append((ticket, batch.lease))
        return batch

    async def withdraw(self, ticket: str) -> None:
        """The reader was cancelled: a get that is parked takes no rows, and one that took some is undone.

        The reader sends this after its get, and calls of one process start in order; an answer that is on its way has
        left no later than CONCURRENT_CALLS answers ago.
        """
        if ticket in self._asking:
            self._asking[ticket].cancel()
        for answered, lease in self._answered:
            if answered == ticket:
                await self.give_back(lease)


@dataclass(frozen=True)
class RayQueue:
    """A TransferQueue client, picklable. The actor lives until `stop`, or until the process that started it ends."""

    spec: QueueSpec
    actor: Any

    @classmethod
    def start(cls, spec: QueueSpec, **actor_options: Any) -> RayQueue:
        """Start the actor, in the Ray that this process is connected to; options are Ray's (`name`,
        `scheduling_strategy`, ...). It takes no CPU of Ray's count unless told to."""
        options = {"num_cpus": 0, "max_concurrency": CONCURRENT_CALLS} | actor_options
        return cls(spec, ray.remote(QueueHost).options(**options).remote(spec))

    def stop(self) -> None:
        """End the actor and all it holds; every waiting call fails."""
        ray.kill(self.actor)

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        ids = as_integers(rows, "rows")
        await self._call("create_partition", name, ids, group_size, timeout_s=timeout_s)

    async def put(
        self, partition: str, rows: Iterable[int], columns: Mapping[str, Column], *, timeout_s: float | None = None
    ) -> None:
        await self._call("put", partition, as_integers(rows, "rows"), dict(columns), timeout_s=timeout_s)

    async def get(
        self,
        task: str,
        count: int,
        *,
        consumer: str = "0",
        rank: int = 0,
        minimum: int | None = None,
        partition: str | None = None,
        first: First | None = None,
        timeout_s: float | None = None,
    ) -> Batch | None:
        ticket = uuid.uuid4().hex
        try:
            batch = await self._call(
                "get_for",
                ticket,
                task,
                count,
                consumer=consumer,
                rank=rank,
                minimum=minimum,
                partition=partition,
                first=first,
                timeout_s=timeout_s,
            )
        except asyncio.CancelledError:
            self.actor.withdraw.remote(ticket)
            raise
        return None if batch is None else _own(batch)

    async def set_bound(self, task: str, consumer: str, below: int) -> None:
        await self._call("set_bound", task, consumer, below)

    async def drop(self, task: str, started: str, below: int) -> list[int]:
        return await self._call("drop", task, started, below)

    async def acknowledge(self, lease: int) -> None:
        await self._call("acknowledge", lease)

    async def give_back(self, lease: int) -> None:
        await self._call("give_back", lease)

    async def release(self, consumer: str) -> None:
        await self._call("release", consumer)

    async def clear(self, partition: str) -> None:
        await self._call("clear", partition)

    async def clear_finished(self) -> list[str]:
        return await self._call("clear_finished")

    async def waiting(self) -> list[str]:
        return await self._call("waiting")

    async def close(self) -> None:
        await self._call("close")

    async def describe(self) -> Mapping[str, Any]:
        return await self._call("describe")

    @contextmanager
    def portal(self) -> Iterator[Portal[Any]]:
        with asyncio.Runner() as runner:
            yield runner.run

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One actor call. Its error arrives as what it is, not wrapped into what carried it."""
        reference = getattr(self.actor, method).remote(*args, **kwargs)
        try:
            return await reference
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise RuntimeError(f"the transfer queue died during {method}: {error}") from error


def _own(batch: Batch) -> Batch:
    """The batch in memory of this process: Ray's buffers are read-only, and held in its store while one is in use."""
    columns: dict[str, Column] = {name: column.copy() for name, column in batch.columns.items()}
    return Batch(batch.partition, batch.rows.copy(), columns, batch.lease)
