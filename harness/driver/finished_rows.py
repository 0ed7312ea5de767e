"""Rows that rollout had finished when a queue was saved, brought into a new one as if an engine had died that had them
all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.transfer_queue import Column, Ragged, TransferQueue
from harness.transfer_queue.rows.columns import taken
from harness.transfer_queue.snapshots.saved_rows import SavedRows, saved_rows
from harness.workers.dataflow import ROLLOUT_COLUMNS

_CONSUMER = "restored"


@dataclass(frozen=True)
class Finished:
    """bounds: of the rows that an engine may have been given under each of these dispatch limits (rows), the lowest
    first; None where it does not matter when they were begun."""

    rows: np.ndarray
    columns: Mapping[str, Column]
    bounds: np.ndarray | None

    @property
    def newest(self) -> float:
        """Time at which the last of them was finished."""
        finished_at = self.columns["finished_at"]
        assert isinstance(finished_at, np.ndarray), "a number each"
        return float(finished_at.max())


def finished_rows(
    queue: Path,
    groups: Collection[int],
    group_size: int,
    limit_of: Callable[[int], int] | None,
    first_sample: Callable[[int], int] | None = None,
) -> dict[str, Finished]:
    """Finished rows of these groups, by partition. limit_of: the dispatch limit (groups) of a version, where training
    follows the order of completion; a sample was begun by the version of its first token. first_sample: that a group's
    rows are to hold, where they may hold others."""
    found, wanted = {}, np.fromiter(groups, np.int64, len(groups))
    told = () if first_sample is None else ("sample",)
    for saved in saved_rows(queue, (*ROLLOUT_COLUMNS, *told)):
        there = np.isin(saved.rows // group_size, wanted)
        if first_sample is not None:
            there &= saved.columns["sample"] == _samples(saved.rows, group_size, first_sample)
        kept = np.flatnonzero(there)
        if kept.size:
            columns = {name: taken(saved.columns[name], kept) for name in ROLLOUT_COLUMNS}
            bounds = None if limit_of is None else _bounds(saved, kept, group_size, limit_of)
            found[saved.partition] = Finished(saved.rows[kept], columns, bounds)
    return found


def _samples(rows: np.ndarray, group_size: int, first_sample: Callable[[int], int]) -> np.ndarray:
    return np.array([first_sample(row // group_size) + row % group_size for row in rows.tolist()], np.int64)


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
