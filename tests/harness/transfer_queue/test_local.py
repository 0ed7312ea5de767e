"""Each sentence of the TransferQueue's contract, on the queue in one event loop. Where time matters it is virtual.

What it refuses is held in test_wire.py, with the same words over a socket."""

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, QueueClosed, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.rows.columns import Column
from harness.transfer_queue.rows.frames import Frame
from harness.transfer_queue.storage.inline import LocalStorage
from tests.support.local_queue import COLUMNS, filled, ids, queue, rewards, soon, virtual

# -- writing


async def test_a_batch_does_not_change_with_the_writers_array_nor_with_another_readers() -> None:
    q = queue(one=TaskSpec(("reward",)), two=TaskSpec(("reward",)))
    await q.create_partition("a", range(2))
    written = np.array([1, 2], np.float32)
    await q.put("a", range(2), {"reward": written})
    written[:] = -1
    one = await q.get("one", 2)
    assert one is not None and one.dense("reward").tolist() == [1, 2]
    one.dense("reward")[:] = -2
    two = await q.get("two", 2)
    assert two is not None and two.dense("reward").tolist() == [1, 2]


async def test_a_put_that_the_storage_fails_marks_nothing_ready_and_can_be_repeated() -> None:
    class Failing(LocalStorage):
        def write(self, partition: str, columns: Mapping[str, Column]) -> Frame:
            if np.any(columns["reward"] < 0):  # type: ignore[operator]
                raise OSError("disk full")
            return super().write(partition, columns)

    q = queue(storage=Failing())
    await q.create_partition("a", range(2))
    with pytest.raises(OSError, match="disk full"):
        await q.put("a", range(2), rewards([-1, -1]))
    assert (await q.describe())["partitions"]["a"]["written"]["reward"] == 0
    await q.put("a", range(2), rewards(range(2)))
    assert ids(await q.get("score", 2)) == [0, 1]


# -- reading


async def test_a_put_wakes_only_the_readers_that_it_satisfies() -> None:
    q = queue(score=TaskSpec(("reward",)), old=TaskSpec(("old",)))
    await q.create_partition("a", range(9))
    waiting = [await soon(q.get("score", 2)) for _ in range(3)] + [await soon(q.get("old", 1))]
    await q.put("a", range(4), rewards(range(4)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False, False]
    assert (await q.describe())["waiting_gets"] == {"score": 1, "old": 1}
    for task in waiting[2:]:
        task.cancel()


@virtual
async def test_a_timeout_names_the_task_its_columns_and_what_is_missing() -> None:
    q = queue(train=TaskSpec(("tokens", "reward"), policy="ready"))
    await q.create_partition("a", range(8))
    await q.put("a", range(5), rewards(range(5)))
    await q.put("a", range(2), {"tokens": Ragged.from_rows([np.array([1])] * 2)})
    with pytest.raises(TimeoutError) as error:
        await q.get("train", 4, timeout_s=3)
    assert str(error.value) == (
        "after 3 s: task 'train' waits for 4 rows of partition 'a': 2 of the 8 rows left are ready; it reads "
        "tokens, reward; rows that lack a column: {'tokens': 6, 'reward': 3}"
    )
    assert ids(await q.get("train", 2)) == [0, 1], "nothing was taken by the get that timed out"


# -- bounds


@pytest.mark.parametrize("policy", ["fifo", "completion"])
async def test_a_consumer_bounded_from_below_passes_over_what_others_left(policy: str) -> None:
    q = await filled(queue(roll=TaskSpec(("reward",), policy=policy)), range(100, 108))
    await q.set_bound("roll", "e0", 106, 104)
    assert ids(await q.get("roll", 8, minimum=1, consumer="e0")) == [104, 105]
    get = await soon(q.get("roll", 8, minimum=1, consumer="e0"))
    assert not get.done()
    assert "ids from 104 to 106 (the bound of consumer 'e0')" in "".join(await q.waiting())
    await q.set_bound("roll", "e0", 102)
    assert ids(await get) == [100, 101]


# -- room, clearing, description


async def test_a_full_queue_makes_the_next_wait_for_a_clear_or_its_close() -> None:
    q = await filled(queue(capacity_rows=4), range(4))
    waiting = [await soon(q.create_partition(name, range(s, s + 2))) for name, s in (("b", 10), ("c", 20), ("d", 30))]
    assert not any(task.done() for task in waiting)
    await q.clear("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False]
    await q.clear("c")
    await waiting[2]
    assert list((await q.describe())["partitions"]) == ["b", "d"]
    q = await filled(queue(capacity_rows=4), range(4))
    waiting = await soon(q.create_partition("b", [9]))
    await q.close()
    with pytest.raises(QueueClosed):
        await waiting


@virtual
async def test_a_writer_without_room_is_told_the_slowest_task() -> None:
    q = await filled(queue(4, score=TaskSpec(("reward",)), train=TaskSpec(("reward", "tokens"))), range(4))
    await q.get("score", 4)
    with pytest.raises(TimeoutError, match="slowest task is 'train' with 4 rows to do, .*'a'.*{'tokens': 4}"):
        await q.create_partition("b", range(4, 8), timeout_s=5)
    await q.clear("a")
    await q.create_partition("b", range(4, 8))


async def test_clearing_frees_the_payload_and_ends_the_gets_of_the_partition() -> None:
    q = await filled(queue(), range(4))
    await q.create_partition("b", [9])
    assert (await q.describe())["bytes"] == 16
    waiting = await soon(q.get("score", 1, partition="b"))
    await q.clear("b")
    await q.clear("a")
    assert await waiting is None and await q.get("score", 1, partition="a") is None
    described = await q.describe()
    assert (described["bytes"], described["live_rows"], described["partitions"]) == (0, 0, {})
    with pytest.raises(ValueError, match="a name is used once"):
        await q.create_partition("a", [1])


class Unpinned(LocalStorage):
    """Notes what the queue lets it drop."""

    pinned = False

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def drop(self, partition: str) -> None:
        self.dropped.append(partition)


@virtual
async def test_payload_is_dropped_only_after_the_last_reader_has_it() -> None:
    storage = Unpinned()
    q = queue(storage=storage)
    await q.create_partition("a", range(2))
    get = await soon(q.get("score", 2))
    await q.put("a", range(2), rewards(range(2)))  # answers it; it has not run since
    await q.clear("a")
    assert (await q.describe())["bytes"] == 0 and storage.dropped == []
    assert ids(await get) == [0, 1]
    assert storage.dropped == ["a"]


async def test_describe_says_what_is_ready_done_and_missing() -> None:
    q = queue(score=TaskSpec(("reward",), lease_s=9), train=TaskSpec(("reward", "tokens"), policy="ready"))
    await q.create_partition("a", range(6))
    await q.put("a", range(4), rewards(range(4)))
    await q.put("a", [3], {"tokens": Ragged.from_rows([np.array([1, 2])])})
    batch = await q.get("score", 3)
    described = await q.describe()
    a = described["partitions"]["a"]
    assert a["tasks"] == {
        "score": {"ready": 1, "handed_out": 3, "done": 0, "dropped": 0, "depth": 3, "missing": {"reward": 2}},
        "train": {
            "ready": 1,
            "handed_out": 0,
            "done": 0,
            "dropped": 0,
            "depth": 6,
            "missing": {"reward": 2, "tokens": 5},
        },
    }
    assert a["written"] == {"tokens": 1, "reward": 4, "old": 0}
    assert (described["depth_samples"], described["open_leases"], described["bytes"]) == (4, 1, 4 * 4 + 2 * 8 + 8)
    assert batch is not None
    await q.acknowledge(batch.lease)
    await q.get("train", 1)
    assert (await q.describe())["depth_samples"] == 3


# -- a cap of nothing; what a reader that is gone had not finished, which goes out again row by row


@pytest.mark.parametrize("cap", [0, -5])
def test_a_cap_of_nothing_is_refused(cap: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_rows must be at least 1, not {cap}"):
        QueueSpec(COLUMNS, {"train": TaskSpec(("reward",))}, capacity_rows=cap)


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
