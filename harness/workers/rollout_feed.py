"""The groups that an engine takes from the queue, and their order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

from harness.runtime.runtime import Waits
from harness.transfer_queue import Batch, TransferQueue
from harness.workers.replaying import RecordedRollout, admitted, rows_of
from harness.workers.sample_flow import SampleFlow


class FeedOrder(Protocol):
    """The order in which a feed takes groups."""

    async def take(self, feed: Feed, partitions: Sequence[str | None]) -> None:
        """All of these partitions (None: of any), until the queue has no more."""


class Ordered:
    """Takes one partition after the other, as much of it at once as is the engine's share."""

    async def take(self, feed: Feed, partitions: Sequence[str | None]) -> None:
        for partition in partitions:
            await feed.take_all(partition, feed.share)


class TakingTurns(Ordered):
    """Takes several partitions side by side, a group at a time: groups may come again with other prompts, long after
    the first ones of their batch, and the next batch does not wait for them."""

    async def take(self, feed: Feed, partitions: Sequence[str | None]) -> None:
        if len(partitions) == 1:
            return await super().take(feed, partitions)
        async with asyncio.TaskGroup() as feeds:
            for partition in partitions:
                feeds.create_task(feed.take_all(partition, feed.group_size))


class RecordedOrder:
    """Takes what this engine began in a recorded run, in the same order, and beside it what was dropped there. It goes
    on where it was."""

    def __init__(self, recorded: RecordedRollout) -> None:
        self._feeds = iter(recorded.groups), iter(recorded.dropped)

    async def take(self, feed: Feed, partitions: Sequence[str | None]) -> None:
        """Raises ConfigError where a group does not come."""
        async with asyncio.TaskGroup() as feeds:
            for groups in self._feeds:
                feeds.create_task(self._take(feed, groups))

    async def _take(self, feed: Feed, groups: Iterator[int]) -> None:
        for group in groups:
            await feed.take_group(group)


class Feed:
    """Consumes groups of the queue, as `consumer`; produces samples of an engine.

    Waits for free slots (unblocked by the flow) and for groups that the dispatch limit allows (unblocked by admission
    and by new weights). share: the most samples that `Ordered` takes at once.
    """

    def __init__(
        self,
        queue: TransferQueue,
        flow: SampleFlow,
        order: FeedOrder,
        waits: Waits,
        *,
        group_size: int,
        share: int,
    ) -> None:
        self._queue, self._flow, self._order, self._waits = queue, flow, order, waits
        self.group_size, self.share = group_size, share
        self._most = 0
        self._retired = False
        self._running: asyncio.Task[None] | None = None
        self._taking_in = 0  # batches that the queue gave, but the engine does not have

    async def run(self, loops: asyncio.TaskGroup, partitions: Sequence[str | None], most: int) -> None:
        """Take groups until the queue has no more, or it retires. most: samples that the engine has at a time."""
        if self._retired:
            return
        self._most = most
        feeding = self._order.take(self, partitions)
        self._running = loops.create_task(feeding, name=f"{self._waits.owner}.feed")
        await asyncio.wait([self._running])
        if self._running.cancelled():
            await self._queue.waiting()  # once this is answered, what a get was given is back in the queue

    def retire(self) -> None:
        """Take no more groups. What the queue gave already still goes to the engine."""
        self._retired = True
        if self._running is not None and not self._taking_in:
            self._running.cancel()

    def rejoin(self) -> None:
        """Take groups again."""
        self._retired = False

    async def take_all(self, partition: str | None, at_once: int) -> None:
        """All groups of a partition, so many samples at once; ends when the queue has no more."""
        while not self._retired and (batch := await self._next(partition, at_once)) is not None:
            await self._take_in(batch)

    async def take_group(self, group: int) -> None:
        """Take this group. Raises ConfigError where it does not come."""
        batch = await self._next(None, self.group_size, rows_of(group, self.group_size))
        await self._take_in(admitted(group, batch))

    async def _take_in(self, batch: Batch) -> None:
        self._taking_in += 1
        await self._flow.take_in(batch)
        self._taking_in -= 1

    async def _next(self, partition: str | None, at_once: int, only: tuple[int, ...] | None = None) -> Batch | None:
        """Groups, as many as there are slots for; None if the queue has no more. only: these rows."""
        n = self.group_size
        while (free := self._flow.free(self._most)) < n:
            self._flow.room.clear()
            with self._waits("feed", "a free slot"):
                await self._flow.room.wait()
        with self._waits("feed", f"groups of {partition or 'any batch'}"):
            return await self._queue.get(
                "rollout",
                min(at_once, free // n * n),
                minimum=n,
                partition=partition,
                consumer=self._waits.owner,
                only=only,
            )
