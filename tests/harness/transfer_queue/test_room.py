"""Backpressure: what does not fit waits, in turn, and is told whose fault it is; nothing is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, LocalQueue, QueueSpec, TaskSpec
from tests.support.local_queue import virtual

ROW_BYTES = 8
COLUMNS = {"reward": ColumnSpec("float64"), "old": ColumnSpec("float64")}


def queue(rows_of_bytes: int) -> LocalQueue:
    return LocalQueue(QueueSpec(COLUMNS, {"train": TaskSpec(("reward",))}, capacity_bytes=rows_of_bytes * ROW_BYTES))


def rewards(rows: range) -> dict[str, np.ndarray]:
    return {"reward": np.array(rows, np.float64)}


async def soon(call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """The call, begun and waiting."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    return task


@virtual
async def test_a_put_beyond_the_cap_waits_until_a_finished_partition_made_room() -> None:
    q = queue(4)
    await q.create_partition("a", range(4))
    await q.create_partition("b", range(10, 12))
    await q.put("a", range(4), rewards(range(4)))
    put = await soon(q.put("b", range(10, 12), rewards(range(10, 12))))
    assert not put.done()
    batch = await q.get("train", 4)
    assert batch is not None and batch.rows.tolist() == [0, 1, 2, 3]
    await put
    assert list((await q.describe())["partitions"]) == ["b"]


@virtual
async def test_a_put_that_finds_no_room_in_time_names_the_slowest_task_and_writes_nothing() -> None:
    q = queue(4)
    await q.create_partition("a", range(6))
    await q.put("a", range(4), rewards(range(4)))
    with pytest.raises(
        TimeoutError, match=r"no room for a put of 16 bytes to partition 'a' in 3 s: the slowest task is 'train'"
    ):
        await q.put("a", [4, 5], rewards(range(4, 6)), timeout_s=3)
    assert (await q.describe())["partitions"]["a"]["written"]["reward"] == 4


@virtual
async def test_a_put_larger_than_the_queue_may_ever_hold_is_refused_at_once() -> None:
    q = queue(4)
    await q.create_partition("a", range(6))
    with pytest.raises(ValueError, match="a put of 48 bytes is more than capacity_bytes=32: put fewer rows"):
        await q.put("a", range(6), rewards(range(6)))
    await q.put("a", range(4), rewards(range(4)))


@virtual
async def test_a_waiting_put_is_refused_when_its_partition_is_cleared() -> None:
    q = queue(4)
    await q.create_partition("a", range(6))
    await q.put("a", range(4), rewards(range(4)))
    put = await soon(q.put("a", [4, 5], rewards(range(4, 6))))
    await q.clear("a")
    with pytest.raises(ValueError, match="'a' was cleared"):
        await put


@virtual
async def test_a_waiting_put_is_listed_among_those_who_wait() -> None:
    q = queue(4)
    await q.create_partition("a", range(6))
    await q.put("a", range(4), rewards(range(4)))
    put = await soon(q.put("a", [4, 5], rewards(range(4, 6))))
    assert any(line.startswith("room for a put of 16 bytes to partition 'a'") for line in await q.waiting())
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert await q.waiting() == []


@pytest.mark.parametrize("cap", [0, -5])
def test_a_cap_of_nothing_is_refused(cap: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_bytes must be at least 1, not {cap}"):
        QueueSpec(COLUMNS, {"train": TaskSpec(("reward",))}, capacity_bytes=cap)
