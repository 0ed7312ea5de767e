"""Who goes first, who is dropped, what is retired and who waits: the contract's sentences on these, in one loop."""

import asyncio
from typing import Any

import pytest

from harness.transfer_queue import Ragged, TaskSpec
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.rows.columns import Column
from tests.support.local_queue import filled, ids, queue, rewards, soon, virtual


def tokens(rows: list[int]) -> dict[str, Column]:
    return {"tokens": Ragged.from_rows([[row] for row in rows], "int64")}  # type: ignore[list-item]


async def waits(task: asyncio.Task[Any]) -> bool:
    """Whether it still waits once every task has had a turn."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def started() -> LocalQueue:
    """Groups of two rows in "a" (0..) and "b" (100..): "old" took the first of each under bound 2, then 102; "new" took
    the second of "a" under bound 4."""
    train = TaskSpec(("reward",), policy="completion", whole_groups=True)
    q = queue(roll=TaskSpec(("tokens",), whole_groups=True), train=train)
    for name, first in (("a", 0), ("b", 100)):
        rows = list(range(first, first + 8))
        await q.create_partition(name, rows, group_size=2)
        await q.put(name, rows, tokens(rows))
    for consumer, below, partition in (("old", 2, "a"), ("new", 4, "a"), ("old", 102, "b")):
        await q.set_bound("roll", consumer, below)
        await q.get("roll", 2, consumer=consumer, partition=partition)
    return q


# -- completion order


@virtual
async def test_nothing_beyond_a_window_from_the_oldest_undispatched_row_goes_out_whatever_its_partition() -> None:
    q = queue(score=TaskSpec(("reward",), policy="completion", window=4))
    await q.create_partition("a", range(4))
    await q.create_partition("b", range(4, 8))
    for name, rows in (("b", [6, 5, 4]), ("a", [3, 1])):
        await q.put(name, rows, rewards(rows))
    assert ids(await q.get("score", 3, minimum=1)) == [1, 3]
    later = asyncio.create_task(q.get("score", 3, minimum=1))
    assert await waits(later) and "with ids below 4 (a window of 4 rows)" in q.waiting_now()[0]
    await q.put("a", [0], rewards([0]))
    assert ids(await later) == [0]
    assert ids(await q.get("score", 3, minimum=1)) == [4, 5]
    await q.put("a", [2], rewards([2]))
    assert [ids(await q.get("score", 3, minimum=1)) for _ in range(2)] == [[2], [6]]


# -- first


@virtual
async def test_what_comes_first_is_named() -> None:
    q = await started()
    with pytest.raises(TimeoutError) as error:
        await q.get("train", 2, partition="a", first=("roll", ((2, 0),)), timeout_s=3)
    assert str(error.value) == (
        "after 3 s: task 'train' waits for 2 rows, first for these 2 of partition 'a', which task 'roll' was handed "
        "under a bound of 2 or less: [0, 1]; it reads reward; rows that lack a column: {'reward': 8}"
    )
    with pytest.raises(TimeoutError, match="waits for 2 rows of partition 'a': 0 of the 8 rows left are ready"):
        await q.get("train", 4, partition="a", first=("roll", ((2, 4), (4, 8))), timeout_s=3)


# -- retiring partitions


@virtual
async def test_finished_partitions_make_room_for_one_that_waits() -> None:
    q = await filled(queue(6, score=TaskSpec(("reward",)), again=TaskSpec(("reward",), lease_s=10)), range(2))
    await filled(q, range(10, 14), "b")
    waiting = await soon(q.create_partition("c", range(20, 22)))
    assert await q.clear_finished() == []
    for name in ("a", "b"):
        await q.get("score", 4, partition=name)
    batch = await q.get("again", 2)
    assert await q.clear_finished() == [], "what is leased is not finished before it is acknowledged"
    assert batch is not None
    await q.acknowledge(batch.lease)
    await waiting
    assert list((await q.describe())["partitions"]) == ["b", "c"]


@virtual
async def test_a_finished_partition_makes_room_and_a_reader_that_gave_up_holds_up_nobody() -> None:
    q = await filled(queue(4, score=TaskSpec(("reward",))), range(4))
    await q.get("score", 4)
    await q.create_partition("b", range(10, 12), timeout_s=1)
    assert list((await q.describe())["partitions"]) == ["b"]
    q = queue()
    await q.create_partition("a", range(2))
    first, second = [await soon(q.get("score", 2)) for _ in range(2)]
    first.cancel()  # it has not run since: it still stands in its line
    await q.put("a", range(2), rewards(range(2)))
    assert ids(await second) == [0, 1]


@virtual
async def test_a_partition_is_kept_while_its_last_reader_may_still_be_cancelled() -> None:
    q = queue()
    await q.create_partition("a", range(2))
    get = await soon(q.get("score", 2))
    await q.put("a", range(2), rewards(range(2)))  # answers it; it has not run since
    assert await q.clear_finished() == []
    get.cancel()
    with pytest.raises(asyncio.CancelledError):
        await get
    assert ids(await q.get("score", 2)) == [0, 1]
    assert await q.clear_finished() == ["a"]


# -- those who wait


@virtual
async def test_every_call_that_waits_is_named_with_what_is_missing() -> None:
    q = await filled(queue(4, score=TaskSpec(("reward",)), train=TaskSpec(("reward", "tokens"))), range(4))
    assert await q.waiting() == []
    await q.get("score", 4)
    await q.set_bound("score", "e0", 9)
    calls = [
        await soon(q.get("train", 2, consumer="trainer")),
        await soon(q.get("score", 1, consumer="e0", partition="later")),
        await soon(q.create_partition("b", range(4, 7))),
    ]
    assert await q.waiting() == q.waiting_now()
    assert q.waiting_now() == [
        "consumer 'trainer' of task 'train' waits for 2 rows of partition 'a': 0 of the 4 rows left are ready; it "
        "reads reward, tokens; rows that lack a column: {'tokens': 4}",
        "consumer 'e0' of task 'score' waits for 1 rows with ids below 9 (the bound of consumer 'e0') of 'later': "
        "there is none",
        "room for the 3 rows of partition 'b': the slowest task is 'train' with 4 rows to do, the oldest in 'a' "
        "(rows that lack a column: {'tokens': 4})",
    ]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert q.waiting_now() == []


# -- rows by their ids


@pytest.mark.parametrize("policy", ["fifo", "ready", "completion"])
@virtual
async def test_named_rows_go_whatever_the_policy_says_once_they_are_ready_and_below_the_bound(policy: str) -> None:
    q = queue(score=TaskSpec(("reward",), policy=policy, whole_groups=True))
    await q.create_partition("a", range(6), group_size=2)
    await q.set_bound("score", "x", 4)
    named = [asyncio.create_task(q.get("score", 2, consumer="x", only=rows)) for rows in ((2, 3), (4, 5))]
    await q.put("a", [0, 1, 2], rewards([0, 1, 2]))
    assert await waits(named[0])
    await q.put("a", [3, 4, 5], rewards([3, 4, 5]))
    assert ids(await named[0]) == [2, 3]
    assert await waits(named[1])
    await q.set_bound("score", "x", 6)
    assert ids(await named[1]) == [4, 5]
    assert ids(await q.get("score", 2)) == [0, 1]
    await q.close()
    assert await q.get("score", 2, only=(2, 3)) is None
