"""Micro-batches where training takes groups as they complete: the first rank of the world reads the queue, and deals
what comes out to all ranks.

Ranks that asked the queue by themselves would not agree on what is left of a batch, nor on how many passes there are;
and each pass of sharded parameters is a collective. So the queue sees one reader, whose bounds, deadlines and ledger
are those of a world of one, and every rank makes as many passes as all others.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from harness.transfer_queue import Batch, Column, GetRequest, TransferQueue, taken, with_get_options
from harness.transfer_queue.control.policies import balanced
from harness.workers.dataflow import TOKENS
from harness.workers.readers import Deadlines, MicroBatchReader, host_groups, joined

Cut = Callable[[np.ndarray, int], list[np.ndarray]]
"""Tokens of groups int64 [n], ranks -> for each rank the places of its groups, ascending."""
Scatter = Callable[[Sequence[Any] | None], Awaitable[Any]]
"""Deals from the first rank of a world to all of them, and returns this rank's share: of one for each rank, in order,
on the first one; None on the others, which wait for it as long as it lives. Every rank makes the same calls."""


class WorldScatter:
    """A way over host memory, in a group of its own: shares are dealt ahead, while gradients travel through other
    groups. Every rank of the world makes one, in the same order."""

    def __init__(self, timeout_s: float) -> None:
        (self._group,) = host_groups([range(dist.get_world_size())], timeout_s)

    async def __call__(self, shares: Sequence[Any] | None) -> Any:
        mine: list[Any] = [None]
        given = None if shares is None else list(shares)
        await asyncio.to_thread(dist.scatter_object_list, mine, given, group=self._group, group_src=0)
        return mine[0]


class DealtReader:
    """A `MicroBatchReader` of one rank. reader: on the first rank, of all that the world trains, in whole groups; None
    on the others. ranks: that train different groups, `together` neighbours each the same ones; cut: of a micro-batch's
    groups by their tokens, as a recorded run's are in the order of its ranks."""

    def __init__(
        self,
        reader: MicroBatchReader | None,
        scatter: Scatter,
        *,
        ranks: int,
        group_size: int,
        together: int = 1,
        cut: Cut = balanced,
    ) -> None:
        self._reader, self._scatter, self._cut = reader, scatter, cut
        self._ranks, self._group_size, self._together = ranks, group_size, together

    async def read(self, iteration: int, first: Deadlines) -> AsyncIterator[Batch]:
        """Read what the first rank deals; every rank gets equally many groups of each micro-batch."""
        dealt = None
        if self._reader is not None:
            dealt = deal(self._reader.read(iteration, first), self._ranks, self._group_size, self._cut)
        while True:
            shares = None
            if dealt is not None:
                shares = to_neighbours(await anext(dealt, [None] * self._ranks), self._together)
            if (batch := await self._scatter(shares)) is None:
                return
            yield batch


async def deal(
    batches: AsyncIterator[Batch], ranks: int, group_size: int, cut: Cut = balanced
) -> AsyncIterator[list[Any]]:
    """A share for each rank, of equally many groups, as soon as there is a group for each. What is left over opens the
    next ones; ValueError where it is left over at the end."""
    held: list[Batch] = []
    async for batch in batches:
        held += in_groups(batch, group_size)
        whole = len(held) - len(held) % ranks
        if whole:
            yield shares_of(held[:whole], ranks, cut)
            held = held[whole:]
    if held:
        raise ValueError(f"{len(held)} groups are left over for {ranks} ranks: batches must divide by these")


class DealtQueue:
    """The queue as a stage sees it that computes when all ranks do: the first rank reads for all of them, and each
    writes what it was dealt. Where there are fewer groups than ranks, some compute another's group once more, and do
    not write it: no row waits for others to come."""

    def __init__(
        self, queue: TransferQueue, scatter: Scatter, *, rank: int, ranks: int, group_size: int, together: int = 1
    ) -> None:
        """rank: of all; ranks, together: as `DealtReader`."""
        self._queue, self._scatter, self._rank = queue, scatter, rank
        self._ranks, self._group_size, self._together = ranks, group_size, together
        self._copies: set[tuple[str, int]] = set()  # partition and first row of what others write

    async def get_batch(self, request: GetRequest) -> Batch | None:
        """Take this rank's share of as many rows a rank as the request names, of one partition."""
        shares = None
        if self._rank == 0:
            batch = await self._queue.get_batch(replace(request, count=request.count * self._ranks))
            shares = to_neighbours(self._shares(batch), self._together)
        share = await self._scatter(shares)
        if share is None:
            return None
        batch, copied = share
        if copied or self._rank % self._together:
            self._copies.add((batch.partition, int(batch.rows[0])))
        return batch

    def _shares(self, batch: Batch | None) -> Sequence[tuple[Batch, bool] | None]:
        """Shares of all ranks, with whether another rank has one as well, and writes it."""
        if batch is None:
            return [None] * self._ranks
        groups = in_groups(batch, self._group_size)
        dealt = shares_of(groups, min(self._ranks, len(groups)), balanced)
        return [(share, False) for share in dealt] + [(dealt[-1], True)] * (self._ranks - len(dealt))

    @with_get_options
    async def get(self, request: GetRequest) -> Batch | None:
        """Take as `get_batch`."""
        return await self.get_batch(request)

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        """Write what no other rank writes."""
        written = list(rows)
        if (partition, written[0]) in self._copies:
            self._copies.remove((partition, written[0]))
        else:
            await self._queue.put(partition, written, columns)


def shares_of(groups: Sequence[Batch], ranks: int, cut: Cut) -> list[Batch]:
    """A share for each rank, of equally many groups where it divides; cut: by their tokens."""
    tokens = np.array([sum(len(group.ragged(column).values) for column in TOKENS) for group in groups])
    return [joined([groups[place] for place in share]) for share in cut(tokens, ranks)]


def to_neighbours(shares: Sequence[Any], together: int) -> list[Any]:
    """Each `together` times in a row."""
    return [share for share in shares for _ in range(together)]


def in_groups(batch: Batch, group_size: int) -> list[Batch]:
    """Batches of one group each, of whole groups."""
    starts = range(0, len(batch), group_size)
    return [some_rows(batch, np.arange(start, start + group_size)) for start in starts]


def some_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """The rows at these places, int64 [k]."""
    columns = {name: taken(column, rows) for name, column in batch.columns.items()}
    return replace(batch, rows=batch.rows[rows], columns=columns)
