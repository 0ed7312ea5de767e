"""Several queues as one: each partition lives in one of them, so that their control planes share the work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from zlib import crc32

from harness.transfer_queue.control.spec import GetRequest, QueueSpec
from harness.transfer_queue.queue import Portal, TransferQueue
from harness.transfer_queue.rows.columns import Batch, Column


class ShardedQueue(TransferQueue):
    """A TransferQueue over queues of one spec. What it costs: a get names its partition (ValueError otherwise), because
    no shard knows what is oldest; caps hold for each shard; and the shard of a lease is part of its number.

    Raises ValueError without shards, or if their specs differ.
    """

    def __init__(self, shards: Sequence[TransferQueue]) -> None:
        if not shards or any(shard.spec != shards[0].spec for shard in shards):
            raise ValueError(f"a sharded queue needs one or more queues of the same spec, not {len(shards)} of several")
        self._shards = tuple(shards)

    @property
    def spec(self) -> QueueSpec:
        return self._shards[0].spec

    def _number(self, partition: str) -> int:
        """The same in every process: Python's own hash is not."""
        return crc32(partition.encode()) % len(self._shards)

    def _shard(self, partition: str) -> TransferQueue:
        return self._shards[self._number(partition)]

    def _owner(self, lease: int) -> tuple[TransferQueue, int]:
        number, shard = divmod(lease, len(self._shards))
        return self._shards[shard], number

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        await self._shard(name).create_partition(name, rows, group_size, timeout_s=timeout_s)

    async def put(
        self, partition: str, rows: Iterable[int], columns: Mapping[str, Column], *, timeout_s: float | None = None
    ) -> None:
        await self._shard(partition).put(partition, rows, columns, timeout_s=timeout_s)

    async def get_batch(self, request: GetRequest) -> Batch | None:
        if request.partition is None:
            raise ValueError(
                f"a get of task {request.task!r} from {len(self._shards)} shards has to name its partition"
            )
        shard = self._number(request.partition)
        batch = await self._shards[shard].get_batch(request)
        return None if batch is None else replace(batch, lease=batch.lease * len(self._shards) + shard)

    async def set_bound(self, task: str, consumer: str, below: int) -> None:
        await asyncio.gather(*(shard.set_bound(task, consumer, below) for shard in self._shards))

    async def drop(self, task: str, started: str, below: int) -> list[int]:
        dropped = await asyncio.gather(*(shard.drop(task, started, below) for shard in self._shards))
        return [row for rows in dropped for row in rows]

    async def begin_again(self, partition: str, rows: Iterable[int]) -> None:
        await self._shard(partition).begin_again(partition, rows)

    async def give_up(self, partition: str, rows: Iterable[int]) -> None:
        await self._shard(partition).give_up(partition, rows)

    async def acknowledge(self, lease: int) -> None:
        shard, number = self._owner(lease)
        await shard.acknowledge(number)

    async def give_back(self, lease: int) -> None:
        shard, number = self._owner(lease)
        await shard.give_back(number)

    async def release(self, consumer: str) -> None:
        await asyncio.gather(*(shard.release(consumer) for shard in self._shards))

    async def clear(self, partition: str) -> None:
        await self._shard(partition).clear(partition)

    async def clear_finished(self) -> list[str]:
        cleared = await asyncio.gather(*(shard.clear_finished() for shard in self._shards))
        return [name for names in cleared for name in names]

    async def waiting(self) -> list[str]:
        described = await asyncio.gather(*(shard.waiting() for shard in self._shards))
        return [f"shard {i}: {line}" for i, lines in enumerate(described) for line in lines]

    async def close(self) -> None:
        await asyncio.gather(*(shard.close() for shard in self._shards))

    async def describe(self) -> Mapping[str, Any]:
        """By the number of a shard, what it describes."""
        described = await asyncio.gather(*(shard.describe() for shard in self._shards))
        return {str(i): one for i, one in enumerate(described)}

    def portal(self) -> AbstractContextManager[Portal[Any]]:
        return self._shards[0].portal()
