"""Training ranks that share layers train on the same micro-batches: one reads the queue, and tells its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from harness.transfer_queue import Batch
from harness.workers.actor import TrainReport
from harness.workers.readers import Deadlines, MicroBatchReader, Share


def tensor_parallel_group(tensor_parallel: int, timeout_s: float) -> dist.ProcessGroup:
    """The group of this rank and those it shares layers with, over host memory. Every rank of the world calls it.

    A group of its own: micro-batches are fetched ahead, while gradients travel through the others.
    """
    starts = range(0, dist.get_world_size(), tensor_parallel)
    blocks = [list(range(start, start + tensor_parallel)) for start in starts]
    timeout = timedelta(seconds=timeout_s)
    groups = [dist.new_group(block, timeout=timeout, backend="gloo") for block in blocks]
    return groups[dist.get_rank() // tensor_parallel]


class TensorParallelReader:
    """`MicroBatchReader` of every rank of a group; only the first has a `reader` of its own."""

    def __init__(self, reader: MicroBatchReader | None, group: dist.ProcessGroup) -> None:
        self._reader, self._group = reader, group

    def share(self, iteration: int, first: Deadlines) -> Share:
        return _ToldShare(None if self._reader is None else self._reader.share(iteration, first), self._group)


class _ToldShare:
    def __init__(self, share: Share | None, group: dist.ProcessGroup) -> None:
        self._share, self._group = share, group

    async def fetch(self) -> Batch | None:
        """Consumes the first rank's rows. Waits for them, elsewhere for that rank; the group's timeout ends it."""
        told = [None if self._share is None else await self._share.fetch()]
        await asyncio.to_thread(dist.broadcast_object_list, told, group=self._group, group_src=0)
        return told[0]


def one_report_per_group(reports: Sequence[TrainReport], tensor_parallel: int) -> list[TrainReport]:
    """All ranks' reports, with samples and sums in one of each group: the others trained the same."""
    return [
        report if rank % tensor_parallel == 0 else replace(report, trained=[], sums={})
        for rank, report in enumerate(reports)
    ]
