"""In which order the actor reads its micro-batches from the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness.transfer_queue import Batch, TransferQueue
from harness.workers.dataflow import partition_name

Deadlines = Sequence[tuple[int, int]]
"""(limit, groups) pairs, limits ascending: what an engine started under a dispatch limit of `limit` or less is among
the next `groups` groups that are trained (see schedules/protocol.py)."""


class Share(Protocol):
    """One rank's part of one training batch."""

    async def fetch(self) -> Batch | None:
        """Wait for the next micro-batch; None after the last. One call at a time."""


class MicroBatchReader(Protocol):
    def share(self, iteration: int, first: Deadlines) -> Share:
        """What to train in `iteration`."""


class FifoReader:
    """As admitted: partition `train_<i>` in group order, dealt out to the ranks in micro-batches of `rows` samples."""

    def __init__(self, queue: TransferQueue, *, rank: int, rows: int, wait_timeout_s: float | None) -> None:
        self.queue, self.rank, self.rows, self.wait_timeout_s = queue, rank, rows, wait_timeout_s

    def share(self, iteration: int, first: Deadlines) -> Share:
        """Raises ValueError where `first` is given: here a group's turn does not depend on who started it when."""
        if first:
            raise ValueError(f"train(first={first}) needs completion order; here groups are read as they were admitted")
        return _PartitionShare(self, iteration)


class _PartitionShare:
    def __init__(self, reader: FifoReader, iteration: int) -> None:
        self._reader, self._partition = reader, partition_name(iteration)

    async def fetch(self) -> Batch | None:
        reader = self._reader
        return await reader.queue.get(
            "actor",
            reader.rows,
            partition=self._partition,
            rank=reader.rank,
            consumer=str(reader.rank),
            timeout_s=reader.wait_timeout_s,
        )


class CompletionReader:
    """Whatever is complete, until `batch` groups are taken: one to `rows` samples at a time, in whole groups.

    For a training world of one rank: with more, ranks would not agree on what is left of the batch.
    """

    def __init__(
        self, queue: TransferQueue, *, rows: int, group_size: int, batch: int, wait_timeout_s: float | None
    ) -> None:
        self.queue, self.rows, self.group_size, self.batch = queue, rows, group_size, batch
        self.wait_timeout_s = wait_timeout_s

    def share(self, iteration: int, first: Deadlines) -> Share:
        return _CompletedShare(self, iteration, first)


class _CompletedShare:
    """Reads whatever is complete, as far as what is due leaves room; dispatch limits and counts are told in rows."""

    def __init__(self, reader: CompletionReader, iteration: int, first: Deadlines) -> None:
        self._reader, self._iteration = reader, iteration
        self._due = [(limit * reader.group_size, groups * reader.group_size) for limit, groups in first]
        self._rows = reader.batch * reader.group_size
        self._taken = 0

    async def fetch(self) -> Batch | None:
        if self._taken == self._rows:
            return None
        reader = self._reader
        due = tuple((below, within - self._taken) for below, within in self._due)
        batch = await reader.queue.get(
            "actor",
            min(reader.rows, self._rows - self._taken),
            minimum=reader.group_size,
            first=("rollout", due) if due else None,
            timeout_s=reader.wait_timeout_s,
        )
        if batch is None:
            left = (self._rows - self._taken) // reader.group_size
            raise RuntimeError(
                f"iteration {self._iteration} lacks {left} of its {reader.batch} groups, and the queue has no more; "
                "admit as many groups as are dropped before closing the prompts"
            )
        self._taken += len(batch.rows)
        return batch
