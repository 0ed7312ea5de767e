"""How training ranks, and stages beside them, read their micro-batches from the queue: in which order, each its rank's,
and of ranks that share layers once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from engines.gloo_groups import all_connected, prove
from harness.transfer_queue import Batch, Column, GetRequest, TransferQueue, concatenated, with_get_options
from harness.workers.dataflow import partition_name

Deadlines = Sequence[tuple[int, int]]
"""(limit, groups) pairs, limits ascending: what an engine started under a dispatch limit of `limit` or less is among
the next `groups` groups that are trained (see schedules/protocol.py)."""
FOR_ROWS = timedelta(days=365)
"""Limit within a group that waits for rows: as long as they take to come. A rank that dies ends its connections."""


class MicroBatchReader(Protocol):
    """Reads what a rank trains on."""

    def read(self, iteration: int, first: Deadlines) -> AsyncIterator[Batch]:
        """Read this rank's part of what is trained in `iteration`, micro-batch by micro-batch, each waited for."""


class FifoReader:
    """Reads as admitted: partition `train_<i>` in group order, split between the ranks in micro-batches of `rows`
    samples. task: of the queue, whose rows these are."""

    def __init__(self, queue: TransferQueue | RankQueue, *, rank: int, rows: int, task: str = "actor") -> None:
        self.queue, self.rank, self.rows, self.task = queue, rank, rows, task

    async def read(self, iteration: int, first: Deadlines) -> AsyncIterator[Batch]:
        """Raises ValueError where `first` is given: here a group's turn does not depend on when it was started."""
        if first:
            raise ValueError(f"train(first={first}) needs completion order; here groups are read as they were admitted")
        while (batch := await self._next(partition_name(iteration))) is not None:
            yield batch

    async def _next(self, partition: str) -> Batch | None:
        return await self.queue.get(self.task, self.rows, partition=partition, rank=self.rank, consumer=str(self.rank))


class CompletionReader:
    """Reads whatever is complete, until `batch` groups are taken: one to `rows` samples at a time, in whole groups; or
    as many as there is room for, where all of the batch is complete and a smaller micro-batch would gain no time.

    For a training world of one rank: with more, ranks would not agree on what is left of the batch.
    """

    def __init__(
        self,
        queue: TransferQueue,
        *,
        rows: int,
        group_size: int,
        batch: int,
        mini_batches: int = 1,
        full: bool = False,
        task: str = "actor",
    ) -> None:
        """batch: groups; mini_batches: parts of it, none of which shares a micro-batch with the next; full: whether
        micro-batches are as large as there is room for; task: of the queue, whose rows these are."""
        self.queue, self.rows, self.group_size, self.batch, self.task = queue, rows, group_size, batch, task
        self._part, self._full = batch // mini_batches * group_size, full

    async def read(self, iteration: int, first: Deadlines) -> AsyncIterator[Batch]:
        """Read as far as `first` leaves room. The queue counts rows where schedules count groups."""
        n, held, room = self.group_size, list[Batch](), 0
        left, taken = self.batch * n, 0
        while left:
            room = room or min(self.rows, left, self._part - taken % self._part)
            deadlines = tuple((limit * n, groups * n - taken) for limit, groups in first)
            batch = await self.queue.get(
                self.task, room, minimum=n, first=("rollout", deadlines) if deadlines else None
            )
            if batch is None:
                raise RuntimeError(
                    f"iteration {iteration} lacks {left // n} of its {self.batch} groups, and the queue has no more; "
                    "admit as many groups as are dropped before closing the prompts"
                )
            rows = len(batch.rows)
            left, taken, room = left - rows, taken + rows, room - rows
            held.append(batch)
            if not (self._full and room):
                yield joined(held)
                held, room = [], 0


def joined(batches: Sequence[Batch]) -> Batch:
    """All rows of one or more batches, of whatever partitions, as of the first one's."""
    if len(batches) == 1:
        return batches[0]
    columns = {name: concatenated([batch.columns[name] for batch in batches]) for name in batches[0].columns}
    return replace(batches[0], rows=np.concatenate([batch.rows for batch in batches]), columns=columns)


class RankQueue:
    """The queue as a rank of a training world sees it, or a stage that shares one: `rank` is its data-parallel rank,
    and it gets that rank's share of each micro-batch. Shares of one micro-batch are the k-th of every rank, whatever
    comes when, if all ranks make the same calls.

    group: of the ranks that share layers, where there are several: the first one reads and writes for all of them.
    """

    def __init__(self, queue: TransferQueue, *, rank: int, group: dist.ProcessGroup | None = None) -> None:
        self._queue, self._rank, self._group = queue, rank, group
        self._first = group is None or dist.get_rank(group) == 0

    async def get_batch(self, request: GetRequest) -> Batch | None:
        """Take rows; the other ranks wait for the first one as long as it lives."""
        shared = [await self._queue.get_batch(replace(request, rank=self._rank)) if self._first else None]
        if self._group is not None:
            await asyncio.to_thread(dist.broadcast_object_list, shared, group=self._group, group_src=0)
        return shared[0]

    @with_get_options
    async def get(self, request: GetRequest) -> Batch | None:
        """Take as `get_batch`."""
        return await self.get_batch(request)

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        """Write; of ranks that share layers, which computed the same, the first one does it."""
        if self._first:
            await self._queue.put(partition, rows, columns)


def host_groups(blocks: Sequence[Sequence[int]], timeout_s: float) -> list[dist.ProcessGroup]:
    """Groups of these ranks over host memory, which wait for rows as long as it takes. Every rank of the world calls
    it, and waits for the others for timeout_s: raises as `engines.gloo_groups.all_connected`."""

    def join() -> list[Any]:
        groups = [dist.new_group(block, timeout=FOR_ROWS, backend="gloo") for block in blocks]
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                prove(group, store)
        return groups

    store, ranks = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    return all_connected(join, store, "groups for rows", dist.get_rank(), ranks, timeout_s)


def group_of_neighbours(together: int, timeout_s: float) -> dist.ProcessGroup:
    """The group of this rank and those it shares micro-batches with, over host memory. Every rank of the world
    calls it.

    A group of its own for each role that reads: micro-batches are fetched ahead, while gradients travel through other
    groups, and one role's may come before another's on one rank, and after it on the next.
    """
    starts = range(0, dist.get_world_size(), together)
    blocks = [list(range(start, start + together)) for start in starts]
    return host_groups(blocks, timeout_s)[dist.get_rank() // together]
