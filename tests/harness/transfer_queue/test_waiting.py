"""Calls that wait for capacity; and what a reader that is gone had not finished, which goes out again row by row."""

import asyncio

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.local import LocalQueue
from tests.support.local_queue import COLUMNS, rewards, soon, virtual


def queue(rows: int) -> LocalQueue:
    """It holds the rewards of so many rows, 4 bytes each."""
    return LocalQueue(QueueSpec(COLUMNS, {"train": TaskSpec(("reward",))}, capacity_bytes=4 * rows))


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
async def test_a_put_without_room_is_refused_or_waits_and_is_listed_until_its_time_or_its_partition_is_over() -> None:
    q = queue(4)
    await q.create_partition("a", range(6))
    with pytest.raises(ValueError, match="a put of 24 bytes is more than capacity_bytes=16: put fewer rows"):
        await q.put("a", range(6), rewards(range(6)))
    await q.put("a", range(4), rewards(range(4)))
    with pytest.raises(TimeoutError, match="room for a put of 8 bytes to partition 'a' in 3 s: the slowest task is 't"):
        await q.put("a", [4, 5], rewards([4, 5]), timeout_s=3)
    assert (await q.describe())["partitions"]["a"]["written"]["reward"] == 4
    given_up, waiting = [await soon(q.put("a", [4, 5], rewards([4, 5]))) for _ in range(2)]
    assert sum(line.startswith("room for a put of 8 bytes to partition 'a'") for line in await q.waiting()) == 2
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert len(await q.waiting()) == 1
    await q.clear("a")
    with pytest.raises(ValueError, match="'a' was cleared"):
        await waiting


@pytest.mark.parametrize("cap", [0, -5])
def test_a_cap_of_nothing_is_refused(cap: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_bytes must be at least 1, not {cap}"):
        QueueSpec(COLUMNS, {"train": TaskSpec(("reward",))}, capacity_bytes=cap)


MADE = {name: ColumnSpec("float32") for name in ("prompt", "response", "length")}
SPEC = QueueSpec(
    MADE,
    {
        "make": TaskSpec(("prompt",), whole_groups=True, writes=("response", "length")),
        "train": TaskSpec(("response", "length"), whole_groups=True, policy="completion"),
    },
)


async def queue_of(groups: int, spec: QueueSpec = SPEC) -> LocalQueue:
    """Groups of three rows, all of which may be made."""
    queue = LocalQueue(spec)
    rows = range(3 * groups)
    await queue.create_partition("p", rows, 3)
    await queue.put("p", rows, {"prompt": np.zeros(len(rows), np.float32)})
    return queue


async def make(queue: LocalQueue, *rows: int, columns: tuple[str, ...] = ("response", "length")) -> None:
    await queue.put("p", rows, dict.fromkeys(columns, np.ones(len(rows), np.float32)))


async def take(queue: LocalQueue, task: str, count: int, **options: object) -> list[int] | None:
    batch = await queue.get(task, count, minimum=3, timeout_s=0.01, **options)  # type: ignore[arg-type]
    return None if batch is None else batch.rows.tolist()


async def test_rows_that_were_made_do_not_go_out_again_and_the_others_do() -> None:
    queue = await queue_of(4)
    assert await take(queue, "make", 9, consumer="dead") == list(range(9))
    await make(queue, 0, 1, 2)
    await make(queue, 4)
    await make(queue, 7, columns=("response",))  # not all of it
    await queue.release("dead")
    assert await take(queue, "make", 6, consumer="other") == [3, 5, 6, 7, 8]
    assert await take(queue, "make", 6, consumer="other") == [9, 10, 11]
    await make(queue, 3, 5, 6, 8, 9, 10, 11)
    await make(queue, 7, columns=("length",))
    await queue.close()
    assert await take(queue, "make", 6) is None
    assert sorted(await take(queue, "train", 12) or []) == list(range(12))
    assert await queue.clear_finished() == ["p"]


async def test_a_reader_that_is_gone_twice_leaves_less_each_time() -> None:
    queue = await queue_of(1)
    for made in range(3):
        assert await take(queue, "make", 3, consumer=f"dead {made}") == list(range(made, 3))
        await make(queue, made)
        await queue.release(f"dead {made}")
    await queue.close()
    assert await take(queue, "make", 3) is None


async def test_a_group_that_was_begun_keeps_the_lowest_bound_it_was_begun_under_and_another_does_not() -> None:
    queue = await queue_of(2)
    await queue.set_bound("make", "old", 6)
    await queue.set_bound("make", "new", 12)
    assert await take(queue, "make", 6, consumer="old") == list(range(6))
    await make(queue, 0)
    await queue.release("old")
    assert await take(queue, "make", 6, consumer="new") == [1, 2, 3, 4, 5]
    assert await queue.drop("train", "make", 6) == [0, 1, 2]
    assert await queue.drop("train", "make", 12) == [3, 4, 5]


async def test_with_a_lease_what_was_made_counts_as_acknowledged() -> None:
    tasks = {"make": TaskSpec(("prompt",), whole_groups=True, lease_s=1e9, writes=("response",))}
    queue = await queue_of(2, QueueSpec(MADE, tasks))
    assert await take(queue, "make", 6, consumer="dead") == list(range(6))
    await make(queue, 0, 1, 2)
    await queue.release("dead")
    batch = await queue.get("make", 3, consumer="other")
    assert batch is not None and batch.rows.tolist() == [3, 4, 5]
    await queue.acknowledge(batch.lease)
    await queue.close()
    assert await take(queue, "make", 3) is None
