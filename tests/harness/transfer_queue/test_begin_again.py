"""Rows that begin again: what was made of them is forgotten, and readers wait for what comes instead."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.local import LocalQueue
from tests.support.local_queue import virtual
from tests.support.queue_in_a_folder import Queue
from tests.support.remote_queue import serving

SPEC = QueueSpec(
    {name: ColumnSpec("int64") for name in ("prompt", "response", "kept")},
    {
        "roll": TaskSpec(("prompt",), whole_groups=True, writes=("response",), settled_by="kept"),
        "judge": TaskSpec(("response",), policy="ready", settled_by="kept"),
        "train": TaskSpec(("response", "kept"), whole_groups=True),
    },
)


async def written(queue: LocalQueue, column: str, rows: range, value: int = 0) -> None:
    await queue.put("a", rows, {column: np.full(len(rows), value)})


async def rolled(queue: LocalQueue, groups: int = 2) -> None:
    """All groups of two were handed out, answered and read, and none is settled."""
    rows = range(2 * groups)
    await queue.create_partition("a", rows, 2)
    await written(queue, "prompt", rows)
    for _ in range(groups):
        assert await queue.get("roll", 2, consumer="engine 0") is not None
    await written(queue, "response", rows, 1)
    assert await queue.get("judge", 2 * groups) is not None


@virtual
async def test_rows_that_begin_again_go_out_with_what_is_written_anew() -> None:
    queue = LocalQueue(SPEC)
    await rolled(queue)
    await queue.begin_again("a", [0, 1])
    assert (await queue.describe())["partitions"]["a"]["written"] == {"prompt": 2, "response": 2, "kept": 0}
    await written(queue, "prompt", range(2), 7)
    batch = await queue.get("roll", 2, partition="a")
    assert batch is not None and batch.rows.tolist() == [0, 1] and batch.dense("prompt").tolist() == [7, 7]
    await written(queue, "response", range(2), 8)
    assert (batch := await queue.get("judge", 2)) is not None and batch.dense("response").tolist() == [8, 8]
    await written(queue, "kept", range(4))
    batch = await queue.get("train", 4)
    assert batch is not None and batch.dense("response").tolist() == [8, 8, 1, 1]
    assert await queue.clear_finished() == ["a"]


@virtual
async def test_a_reader_waits_until_every_row_is_settled() -> None:
    queue = LocalQueue(SPEC)
    await rolled(queue)
    waits = asyncio.create_task(queue.get("roll", 2, partition="a"))
    await asyncio.sleep(1)
    assert not waits.done()
    await written(queue, "kept", range(2))
    await asyncio.sleep(1)
    assert not waits.done()
    await written(queue, "kept", range(2, 4))
    assert await waits is None and await queue.get("judge", 2, partition="a") is None


@virtual
async def test_a_consumer_that_dies_gives_back_nothing_that_began_again() -> None:
    queue = LocalQueue(SPEC)
    await rolled(queue, groups=1)
    await queue.begin_again("a", [0, 1])
    await written(queue, "prompt", range(2))
    assert await queue.get("roll", 2, consumer="engine 1") is not None
    await queue.release("engine 0")
    assert [line for line in await queue.waiting()] == []
    with pytest.raises(TimeoutError):
        await queue.get("roll", 2, timeout_s=1)
    await queue.release("engine 1")
    assert await queue.get("roll", 2) is not None


@virtual
async def test_what_is_settled_handed_out_or_part_of_a_group_is_neither_begun_again_nor_given_up() -> None:
    queue = LocalQueue(SPEC)
    await rolled(queue)
    await written(queue, "kept", range(2))
    with pytest.raises(ValueError, match="row 0 of partition 'a' has 'kept'"):
        await queue.begin_again("a", [0, 1])
    with pytest.raises(ValueError, match="in whole groups of 2, not \\[2\\]"):
        await queue.begin_again("a", [2])
    queue = LocalQueue(SPEC)
    await rolled(queue)
    await written(queue, "kept", range(2))
    assert await queue.get("train", 2) is not None
    with pytest.raises(ValueError, match="cannot be given up: task 'train' has, or had, them"):
        await queue.give_up("a", range(4))
    with pytest.raises(ValueError, match="are given up in whole groups of 2, not \\[2\\]"):
        await queue.give_up("a", [2])
    await queue.give_up("a", [2, 3])


@virtual
async def test_what_began_again_is_so_in_a_saved_queue(tmp_path: Path) -> None:
    queue = LocalQueue(SPEC)
    await rolled(queue)
    await queue.begin_again("a", [2, 3])
    await queue.save(tmp_path)
    again = LocalQueue.load(SPEC, tmp_path)
    await written(again, "prompt", range(2, 4), 5)
    batch = await again.get("roll", 2)
    assert batch is not None and batch.rows.tolist() == [2, 3] and batch.dense("prompt").tolist() == [5, 5]
    await written(again, "kept", range(2))
    with pytest.raises(TimeoutError):
        await again.get("roll", 2, partition="a", timeout_s=1)


@virtual
async def test_what_is_given_up_is_trained_by_nobody_and_waited_for_by_nobody() -> None:
    queue = LocalQueue(SPEC)
    await rolled(queue, groups=3)
    waits = asyncio.create_task(queue.get("train", 4))
    await queue.give_up("a", [0, 1])
    await written(queue, "kept", range(2, 6))
    batch = await waits
    assert batch is not None and batch.rows.tolist() == [2, 3, 4, 5]
    assert await queue.get("train", 2, partition="a") is None
    assert await queue.clear_finished() == [], "those who judge it have not settled it"
    await written(queue, "kept", range(2))
    assert await queue.get("roll", 2, partition="a") is None and await queue.clear_finished() == ["a"]


async def test_a_saved_queue_and_a_socket_know_what_was_given_up(tmp_path: Path) -> None:
    queue = Queue()
    await queue.service.create_partition("a", range(2))
    queue.service.give_up("a", [0])
    queue.put([0, 1])
    await queue.save(tmp_path)
    assert Queue(tmp_path).get("score") == (0, [1])
    async with serving() as (_, client):
        await client.create_partition("a", range(2))
        await client.give_up("a", [0])
        with pytest.raises(ValueError, match="cannot be given up"):
            await client.give_up("a", [0])


async def test_rows_that_were_handed_over_go_out_again_where_their_new_consumer_dies() -> None:
    queue = Queue()
    await queue.service.create_partition("a", range(4))
    queue.put([0, 1, 2, 3])
    assert queue.get("train", consumer="lent")[1] == [0, 1]
    queue.service.reassign("train", [1], "other")
    queue.service.release("lent")
    assert queue.get("train", 1)[1] == [0]
    queue.service.release("other")
    assert queue.get("train", 1)[1] == [1]
