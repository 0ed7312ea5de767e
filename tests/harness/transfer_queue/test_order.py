"""Who goes first, who is dropped, what is retired and who waits; rows that begin again; a task that nobody waits for:
the contract's sentences on these, in one loop."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.control.reporting import queue_metrics
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.rows.columns import Column
from tests.support.local_queue import filled, ids, queue, rewards, soon, virtual
from tests.support.queue_in_a_folder import Queue
from tests.support.remote_queue import serving


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


# -- rows that begin again: what was made of them is forgotten, and readers wait for what comes instead


SETTLED = QueueSpec(
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
    queue = LocalQueue(SETTLED)
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
    queue = LocalQueue(SETTLED)
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
    queue = LocalQueue(SETTLED)
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
    queue = LocalQueue(SETTLED)
    await rolled(queue)
    await written(queue, "kept", range(2))
    with pytest.raises(ValueError, match="row 0 of partition 'a' has 'kept'"):
        await queue.begin_again("a", [0, 1])
    with pytest.raises(ValueError, match="in whole groups of 2, not \\[2\\]"):
        await queue.begin_again("a", [2])
    queue = LocalQueue(SETTLED)
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
    queue = LocalQueue(SETTLED)
    await rolled(queue)
    await queue.begin_again("a", [2, 3])
    await queue.save(tmp_path)
    again = LocalQueue.load(SETTLED, tmp_path)
    await written(again, "prompt", range(2, 4), 5)
    batch = await again.get("roll", 2)
    assert batch is not None and batch.rows.tolist() == [2, 3] and batch.dense("prompt").tolist() == [5, 5]
    await written(again, "kept", range(2))
    with pytest.raises(TimeoutError):
        await again.get("roll", 2, partition="a", timeout_s=1)


@virtual
async def test_what_is_given_up_is_trained_by_nobody_and_waited_for_by_nobody() -> None:
    queue = LocalQueue(SETTLED)
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
    queue = await Queue.of(range(4))
    assert queue.get("train", consumer="lent")[1] == [0, 1]
    queue.service.reassign("train", [1], "other")
    queue.service.release("lent")
    assert queue.get("train", 1)[1] == [0]
    queue.service.release("other")
    assert queue.get("train", 1)[1] == [1]


# -- a task that nobody waits for: it looks at rows, gives them back, and is told later that they are finished


WITH_BACKGROUND = QueueSpec(
    {"reward": ColumnSpec("float32")},
    {
        "train": TaskSpec(("reward",), whole_groups=True),
        "record": TaskSpec(("reward",), policy="ready", lease_s=math.inf, background=True),
    },
    capacity_rows=4,
)


async def trained(queue: LocalQueue, name: str, rows: range) -> None:
    await filled(queue, rows, name, 2)
    assert await queue.get("train", len(rows)) is not None


@virtual
async def test_rows_that_only_the_background_reads_take_no_room_and_count_in_no_depth_but_stay() -> None:
    queue = LocalQueue(WITH_BACKGROUND)
    await trained(queue, "a", range(4))
    described = await queue.describe()
    assert described["depth_samples"] == 0 and not [name for name in queue_metrics(described) if "record" in name]
    await filled(queue, range(4, 8), "b", 2)  # would wait for ever, were there no room
    batch = await queue.get("record", 2, only=(3, 1), consumer="recorder")
    assert batch is not None and batch.dense("reward").tolist() == [1, 3]
    assert await queue.clear_finished() == []


@virtual
async def test_what_was_given_back_is_read_again_and_freed_once_it_is_finished() -> None:
    queue = LocalQueue(WITH_BACKGROUND)
    await trained(queue, "a", range(4))
    for _ in range(2):  # the first reader died over it
        batch = await queue.get("record", 4, only=(0, 1, 2, 3), consumer="recorder")
        assert batch is not None
        await queue.release("recorder")
    await queue.finish("record", [0, 1])
    assert await queue.clear_finished() == []
    await queue.finish("record", [2, 3])
    assert await queue.clear_finished() == ["a"]


@virtual
async def test_rows_are_finished_whenever_and_handed_out_a_partition_at_a_time() -> None:
    queue = LocalQueue(WITH_BACKGROUND)
    await trained(queue, "a", range(2))
    await queue.create_partition("b", range(2, 4), 2)
    await queue.finish("record", [3, 0, 1, 2])
    assert await queue.clear_finished() == ["a"], "what is still to be written of b would come too late"
    await queue.put("b", range(2, 4), {"reward": np.zeros(2, np.float32)})
    assert await queue.get("train", 2) is not None and await queue.clear_finished() == ["b"]
    queue = await filled(LocalQueue(WITH_BACKGROUND), range(2), group_size=2)
    await filled(queue, range(2, 4), "b", 2)
    first = await queue.get("record", 3, only=(3, 0, 2))
    rest = await queue.get("record", 1, only=(0,))
    assert first is not None and first.rows.tolist() == [2, 3] and rest is not None and rest.rows.tolist() == [0]


@virtual
async def test_what_somebody_has_is_in_no_partition_or_is_part_of_a_group_cannot_be_finished() -> None:
    queue = LocalQueue(WITH_BACKGROUND)
    await trained(queue, "a", range(2))
    await filled(queue, range(2, 4), "b", 2)
    assert await queue.get("record", 1, only=(0,)) is not None
    with pytest.raises(ValueError, match="partition 'a' cannot be finished: task 'record' has, or had, them"):
        await queue.finish("record", [0])
    with pytest.raises(ValueError, match="are in no partition: task 'record' cannot finish them"):
        await queue.finish("record", [1, 9])
    with pytest.raises(ValueError, match="are finished in whole groups of 2, not \\[2\\]"):
        await queue.finish("train", [2])
    await queue.finish("record", [1])


@virtual
async def test_a_partition_that_waits_for_room_gets_it_when_the_others_are_done() -> None:
    queue = await filled(LocalQueue(WITH_BACKGROUND), range(4), group_size=2)
    waits = asyncio.create_task(filled(queue, range(4, 8), "b", 2))
    await asyncio.sleep(1)
    assert not waits.done()
    assert await queue.get("train", 4) is not None
    await waits


async def test_rows_are_finished_through_a_socket() -> None:
    async with serving() as (_, queue):
        await queue.create_partition("a", range(2))
        with pytest.raises(ValueError, match="is unknown"):
            await queue.finish("nobody", [0])
        await queue.finish(next(iter(queue.spec.tasks)), [0, 1])
