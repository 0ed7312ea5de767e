"""What rollout had finished when a queue was saved, brought into a new one as if an engine had died that had it all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.transfer_queue import Column, Ragged, TransferQueue
from harness.transfer_queue.journal.saved_rows import SavedRows, saved_rows
from harness.transfer_queue.rows.columns import taken
from harness.workers.dataflow import ROLLOUT_COLUMNS

_CONSUMER = "restored"


@dataclass(frozen=True)
class Finished:
    """bounds: of the rows that an engine may have been given under each of these dispatch limits (rows), the lowest
    first; None where it does not matter when they were begun."""

    rows: np.ndarray
    columns: Mapping[str, Column]
    bounds: np.ndarray | None


def finished_rows(
    queue: Path, groups: Collection[int], group_size: int, limit_of: Callable[[int], int] | None
) -> dict[str, Finished]:
    """By partition, of these groups. limit_of: the dispatch limit (groups) of a version, where training follows the
    order of completion; a sample was begun by the version of its first token."""
    found = {}
    for saved in saved_rows(queue, tuple(ROLLOUT_COLUMNS)):
        kept = np.flatnonzero(np.isin(saved.rows // group_size, np.fromiter(groups, np.int64, len(groups))))
        if kept.size:
            columns = {name: taken(column, kept) for name, column in saved.columns.items()}
            bounds = None if limit_of is None else _bounds(saved, kept, group_size, limit_of)
            found[saved.partition] = Finished(saved.rows[kept], columns, bounds)
    return found


def _bounds(saved: SavedRows, kept: np.ndarray, group_size: int, limit_of: Callable[[int], int]) -> np.ndarray:
    versions = saved.columns["versions"]
    assert isinstance(versions, Ragged)
    first = versions.values[versions.offsets[:-1]][kept]
    return np.array([limit_of(int(version)) * group_size for version in first], np.int64)


async def put_finished(queue: TransferQueue, partition: str, rows: int, finished: Finished) -> None:
    """rows: of the partition that have a prompt, all of which nobody has been given yet."""
    if finished.bounds is None:
        await _put(queue, partition, rows, finished, np.arange(finished.rows.size))
        return
    for bound in np.unique(finished.bounds):
        of_bound = np.flatnonzero((finished.bounds == bound) & (finished.rows < bound))
        await queue.set_bound("rollout", _CONSUMER, int(bound))
        await _put(queue, partition, rows, finished, of_bound)


async def _put(queue: TransferQueue, partition: str, rows: int, finished: Finished, these: np.ndarray) -> None:
    """Take all that there is, write what is finished, and leave the rest to others."""
    if not these.size:
        return
    await queue.get("rollout", rows, minimum=1, partition=partition, consumer=_CONSUMER)
    columns = {name: taken(column, these) for name, column in finished.columns.items()}
    await queue.put(partition, finished.rows[these], columns)
    await queue.release(_CONSUMER)
