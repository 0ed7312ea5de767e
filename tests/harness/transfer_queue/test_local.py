"""Each sentence of the TransferQueue's contract, on the queue in one event loop. Where time matters it is virtual.

What it refuses is held in test_wire.py, with the same words over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from harness.transfer_queue import LeaseExpired, QueueClosed, Ragged, TaskSpec
from harness.transfer_queue.control.policies import POLICIES
from harness.transfer_queue.rows.columns import Column
from harness.transfer_queue.rows.frames import Frame
from harness.transfer_queue.storage.inline import LocalStorage
from tests.support.local_queue import filled, ids, queue, rewards, soon, virtual

# -- writing


async def test_a_row_is_handed_out_once_all_of_its_columns_are_written_in_any_order() -> None:
    q = queue(train=TaskSpec(("tokens", "reward")))
    await q.create_partition("a", range(2))
    tokens = Ragged.from_rows([np.array([7, 8]), np.array([9])])
    await q.put("a", [1], {"reward": np.array([1], np.float32)})
    await q.put("a", [1, 0], {"tokens": tokens.take([1, 0])})
    get = await soon(q.get("train", 2))
    assert not get.done()
    await q.put("a", [0], {"reward": np.array([0], np.float32)})
    batch = await get
    assert batch is not None and ids(batch) == [0, 1] and batch.partition == "a"
    assert batch.dense("reward").tolist() == [0, 1]
    assert [row.tolist() for row in batch.ragged("tokens").rows()] == [[7, 8], [9]]


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


async def test_rows_may_be_any_ids_and_keep_the_partitions_order() -> None:
    q = await filled(queue(), [40, 7, 1000, 8])
    assert ids(await q.get("score", 4)) == [40, 7, 1000, 8]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TaskSpec(("speed",)), "unknown columns \\['speed'\\]"),
        (TaskSpec(()), "one or more different columns"),
        (TaskSpec(("reward",), policy="lifo"), "unknown policy 'lifo'"),
        (TaskSpec(("reward",), ranks=0), "at least one rank, not 0"),
        (TaskSpec(("reward",), lease_s=0), "more than 0 seconds, not 0"),
    ],
)
def test_a_task_that_cannot_work_is_refused_when_the_queue_is_made(task: TaskSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        queue(score=task)


# -- reading


async def test_a_get_waits_for_its_minimum_and_takes_up_to_its_count() -> None:
    q = queue()
    await q.create_partition("a", range(10))
    get = await soon(q.get("score", 6, minimum=3))
    await q.put("a", [0, 1], rewards([0, 1]))
    assert not get.done()
    await q.put("a", [2, 3, 4], rewards([2, 3, 4]))
    assert ids(await get) == [0, 1, 2, 3, 4]
    await q.put("a", range(5, 10), rewards(range(5, 10)))
    assert ids(await q.get("score", 4, minimum=1)) == [5, 6, 7, 8]


async def test_the_end_of_a_partition_is_handed_out_though_it_is_less_than_the_minimum() -> None:
    q = queue()
    await q.create_partition("a", range(5))
    await q.put("a", range(4), rewards(range(4)))
    assert ids(await q.get("score", 3)) == [0, 1, 2]
    get = await soon(q.get("score", 3))
    assert not get.done(), "the rest is not all ready"
    await q.put("a", [4], rewards([4]))
    assert ids(await get) == [3, 4]
    assert await q.get("score", 3, partition="a") is None


@virtual
async def test_a_waiting_reader_blocks_neither_writers_nor_readers() -> None:
    q = queue(slow=TaskSpec(("old",)), score=TaskSpec(("reward",)))
    await q.create_partition("a", range(2))
    slow = await soon(q.get("slow", 1))
    greedy = await soon(q.get("score", 2, timeout_s=10))
    await q.put("a", [0], rewards([0]))
    assert ids(await q.get("score", 1)) == [0]
    assert not slow.done() and not greedy.done()
    await q.put("a", [1], rewards([1]))
    assert ids(await greedy) == [1]
    await q.put("a", [0], {"old": Ragged.from_rows([np.zeros(1, np.float32)])})
    assert ids(await slow) == [0]


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


async def test_fifo_batches_are_the_same_whatever_the_order_of_the_puts() -> None:
    batches = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 4, 2], [2, 4, 0, 1, 5, 3]):
        q = queue(score=TaskSpec(("reward",), policy="fifo"))
        await q.create_partition("a", range(6))
        got = []
        for row in order:
            await q.put("a", [row], rewards([row]))
            get = await soon(q.get("score", 2))
            if get.done():
                got.append(ids(await get))
            else:
                get.cancel()
        while (batch := await q.get("score", 2, partition="a")) is not None:
            got.append(ids(batch))
        batches.append(got)
    assert batches == [[[0, 1], [2, 3], [4, 5]]] * 3


async def test_ready_hands_out_the_lowest_ready_rows_without_waiting_for_the_head() -> None:
    q = queue(score=TaskSpec(("reward",), policy="ready"))
    await q.create_partition("a", range(6))
    await q.put("a", [5, 2, 4], rewards([5, 2, 4]))
    assert ids(await q.get("score", 2)) == [2, 4]
    await q.put("a", [0], rewards([0]))
    assert ids(await q.get("score", 2)) == [0, 5]


@pytest.mark.parametrize("policy", ["fifo", "ready"])
async def test_a_group_is_handed_out_whole(policy: str) -> None:
    q = queue(score=TaskSpec(("reward",), policy=policy, whole_groups=True))
    await q.create_partition("a", range(9), group_size=3)
    await q.put("a", [0, 1, 3, 4, 5], rewards([0, 1, 3, 4, 5]))
    get = await soon(q.get("score", 3))
    assert get.done() is (policy == "ready")
    await q.put("a", [2], rewards([2]))
    assert ids(await get) == ([0, 1, 2] if policy == "fifo" else [3, 4, 5])


async def test_partitions_are_served_in_creation_order_and_never_mixed() -> None:
    q = queue()
    await filled(q, range(3), "a")
    await filled(q, range(10, 13), "b")
    assert [ids(await q.get("score", 2)) for _ in range(4)] == [[0, 1], [2], [10, 11], [12]]


async def test_fifo_waits_for_the_oldest_partition_and_ready_passes_it_over() -> None:
    q = queue(fifo=TaskSpec(("reward",)), ready=TaskSpec(("reward",), policy="ready"))
    await q.create_partition("a", range(2))
    await filled(q, range(10, 12), "b")
    fifo = await soon(q.get("fifo", 2))
    assert not fifo.done() and ids(await q.get("ready", 2)) == [10, 11]
    await q.put("a", range(2), rewards(range(2)))
    assert ids(await fifo) == [0, 1]


async def test_a_named_partition_may_be_asked_for_before_it_exists() -> None:
    q = queue()
    get = await soon(q.get("score", 1, partition="later"))
    await filled(q, [0], "sooner")
    await filled(q, [1], "later")
    assert ids(await get) == [1]


async def test_every_task_gets_every_row_once() -> None:
    q = await filled(queue(one=TaskSpec(("reward",)), two=TaskSpec(("reward",), policy="ready")), range(8))
    for task in ("one", "two"):
        got: list[int] = []
        while (batch := await q.get(task, 3, partition="a")) is not None:
            got += ids(batch)
        assert got == list(range(8))


async def test_the_queue_is_exhausted_only_when_it_is_closed_and_empty() -> None:
    q = await filled(queue(), range(2))
    assert ids(await q.get("score", 1)) == [0]
    await q.close()
    assert ids(await q.get("score", 1)) == [1]
    assert await q.get("score", 1) is None
    with pytest.raises(QueueClosed):
        await q.create_partition("b", [5])


async def test_closing_wakes_those_who_wait_for_more() -> None:
    q = await filled(queue(), range(2))
    assert ids(await q.get("score", 2)) == [0, 1]
    waiting = [await soon(q.get("score", 2)), await soon(q.get("score", 2, partition="never"))]
    assert not any(task.done() for task in waiting)
    await q.close()
    assert await asyncio.gather(*waiting) == [None, None]


async def test_a_reader_learns_of_the_end_when_another_takes_the_rest() -> None:
    q = queue()
    await q.create_partition("a", range(2))
    waiting = [await soon(q.get("score", 2, partition="a")) for _ in range(2)]
    await q.put("a", range(2), rewards(range(2)))
    first, second = await asyncio.gather(*waiting)
    assert ids(first) == [0, 1] and second is None


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


async def test_a_cancelled_get_takes_nothing_even_if_it_was_just_answered() -> None:
    q = queue()
    await q.create_partition("a", range(2))
    get = await soon(q.get("score", 2))
    await q.put("a", range(2), rewards(range(2)))  # answers it; it has not run since
    get.cancel()
    with pytest.raises(asyncio.CancelledError):
        await get
    assert ids(await q.get("score", 2)) == [0, 1]


# -- data-parallel ranks


async def test_each_rank_gets_its_contiguous_share_whatever_the_order_of_the_requests() -> None:
    q = await filled(queue(train=TaskSpec(("reward",), ranks=2)), range(8))
    one = await soon(q.get("train", 2, rank=1))
    assert ids(await one) == [2, 3]
    assert ids(await q.get("train", 2, rank=1)) == [6, 7]
    assert ids(await q.get("train", 2, rank=0)) == [0, 1]
    assert ids(await q.get("train", 2, rank=0)) == [4, 5]
    assert [await q.get("train", 2, rank=r, partition="a") for r in (0, 1)] == [None, None]


async def test_ranks_wait_until_there_is_enough_for_all_of_them() -> None:
    q = queue(train=TaskSpec(("reward",), ranks=2))
    await q.create_partition("a", range(8))
    gets = [await soon(q.get("train", 2, rank=rank)) for rank in (1, 0)]
    await q.put("a", range(3), rewards(range(3)))
    assert not any(get.done() for get in gets)
    await q.put("a", [3], rewards([3]))
    assert [ids(batch) for batch in await asyncio.gather(*gets)] == [[2, 3], [0, 1]]


async def test_a_short_final_batch_is_split_as_evenly_as_whole_groups_allow() -> None:
    q = await filled(queue(train=TaskSpec(("reward",), ranks=3, whole_groups=True)), range(16), group_size=2)
    first = [ids(await q.get("train", 4, rank=rank)) for rank in range(3)]
    assert first == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    last = [await q.get("train", 4, rank=rank) for rank in range(3)]
    assert [ids(batch) for batch in last] == [[12, 13], [14, 15], []]
    assert last[2] is not None and last[2].dense("reward").shape == (0,)


async def test_a_rank_that_dies_finds_its_share_again_and_the_others_are_not_disturbed() -> None:
    q = await filled(queue(train=TaskSpec(("reward",), ranks=2)), range(8))
    assert ids(await q.get("train", 2, rank=0, consumer="w0")) == [0, 1]
    assert ids(await q.get("train", 2, rank=1, consumer="w1")) == [2, 3]
    assert ids(await q.get("train", 2, rank=0, consumer="w0")) == [4, 5]
    await q.release("w1")
    assert [ids(await q.get("train", 2, rank=1, consumer="w1b")) for _ in range(2)] == [[2, 3], [6, 7]]


# -- bounds


@pytest.mark.parametrize("policy", ["fifo", "ready"])
async def test_a_bounded_consumer_gets_only_rows_below_its_bound_until_it_is_raised(policy: str) -> None:
    q = await filled(queue(roll=TaskSpec(("reward",), policy=policy)), range(100, 108))
    await q.set_bound("roll", "e0", 103)
    assert ids(await q.get("roll", 8, minimum=1, consumer="e0")) == [100, 101, 102]
    get = await soon(q.get("roll", 8, minimum=1, consumer="e0"))
    assert not get.done()
    assert ids(await q.get("roll", 1, consumer="e1")) == [103], "the others have no bound"
    await q.set_bound("roll", "e0", 105)
    assert ids(await get) == [104]


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


@virtual
async def test_a_bounded_reader_learns_that_others_took_the_rest() -> None:
    q = await filled(queue(roll=TaskSpec(("reward",))), range(2))
    await q.set_bound("roll", "e0", 0)
    get = await soon(q.get("roll", 1, consumer="e0", partition="a", timeout_s=10))
    assert ids(await q.get("roll", 2, consumer="e1")) == [0, 1]
    assert await get is None


@virtual
async def test_a_rank_that_waits_for_more_takes_its_share_of_what_another_rank_formed() -> None:
    q = queue(train=TaskSpec(("reward",), ranks=2))
    await q.create_partition("a", range(8))
    await q.put("a", range(2), rewards(range(2)))
    get = await soon(q.get("train", 4, rank=1, timeout_s=10))
    assert ids(await q.get("train", 4, rank=0, minimum=1)) == [0]
    assert ids(await get) == [1]


@virtual
async def test_a_group_is_bounded_by_all_of_its_rows() -> None:
    q = await filled(queue(roll=TaskSpec(("reward",), whole_groups=True)), range(6), group_size=2)
    await q.set_bound("roll", "e0", 3)
    assert ids(await q.get("roll", 4, minimum=1, consumer="e0")) == [0, 1]
    with pytest.raises(TimeoutError, match="ids below 3"):
        await q.get("roll", 2, consumer="e0", timeout_s=1)


# -- leases


@virtual
async def test_rows_whose_lease_ran_out_go_out_again_and_a_late_acknowledgement_is_refused() -> None:
    q = await filled(queue(score=TaskSpec(("reward",), lease_s=10)), range(4))
    first = await q.get("score", 2)
    second = await q.get("score", 2)
    assert first is not None and second is not None
    await q.acknowledge(second.lease)
    started = asyncio.get_running_loop().time()
    again = await q.get("score", 2)  # pending, woken by the lease's timer
    assert asyncio.get_running_loop().time() - started == pytest.approx(10)
    assert again is not None and ids(again) == [0, 1]
    with pytest.raises(LeaseExpired):
        await q.acknowledge(first.lease)
    await q.acknowledge(again.lease)
    await q.acknowledge(again.lease)
    assert await q.get("score", 2, partition="a") is None


@virtual
async def test_a_partition_with_leases_is_exhausted_only_when_all_is_acknowledged() -> None:
    q = await filled(queue(score=TaskSpec(("reward",), lease_s=10)), range(2))
    batch = await q.get("score", 2)
    assert batch is not None
    end = await soon(q.get("score", 2, partition="a"))
    assert not end.done()
    await q.acknowledge(batch.lease)
    assert await end is None


async def test_a_reader_of_leased_rows_goes_on_to_the_next_partition() -> None:
    q = queue(score=TaskSpec(("reward",), lease_s=10))
    await filled(q, range(2), "a")
    await filled(q, range(5, 7), "b")
    assert [ids(await q.get("score", 2)) for _ in range(2)] == [[0, 1], [5, 6]]


@pytest.mark.parametrize("lease_s", [None, 10.0])
async def test_what_a_dead_consumer_did_not_acknowledge_goes_out_again(lease_s: float | None) -> None:
    q = await filled(queue(score=TaskSpec(("reward",), lease_s=lease_s)), range(6))
    done = await q.get("score", 2, consumer="dead")
    lost = await q.get("score", 2, consumer="dead")
    assert done is not None and lost is not None
    await q.acknowledge(done.lease)
    await q.release("dead")
    assert ids(await q.get("score", 4)) == [2, 3, 4, 5]
    with pytest.raises(LeaseExpired):
        await q.acknowledge(lost.lease)


async def test_releasing_a_consumer_ends_its_waiting_gets_and_wakes_the_others() -> None:
    q = await filled(queue(score=TaskSpec(("reward",), lease_s=10)), range(2))
    await q.get("score", 2, consumer="dead")
    dead = await soon(q.get("score", 1, consumer="dead"))
    alive = await soon(q.get("score", 2, consumer="alive"))
    await q.release("dead")
    with pytest.raises(LeaseExpired, match="'dead' was released while it waited"):
        await dead
    assert ids(await alive) == [0, 1]


async def test_a_batch_given_back_goes_out_again() -> None:
    q = await filled(queue(), range(4))
    batch = await q.get("score", 2)
    assert batch is not None
    await q.give_back(batch.lease)
    await q.give_back(batch.lease)
    assert ids(await q.get("score", 4)) == [0, 1, 2, 3]


# -- room, clearing, description


async def test_a_full_queue_makes_the_next_partition_wait_for_a_clear() -> None:
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


@virtual
async def test_a_writer_without_room_is_told_the_slowest_task() -> None:
    q = await filled(queue(4, score=TaskSpec(("reward",)), train=TaskSpec(("reward", "tokens"))), range(4))
    await q.get("score", 4)
    with pytest.raises(TimeoutError, match="slowest task is 'train' with 4 rows to do, .*'a'.*{'tokens': 4}"):
        await q.create_partition("b", range(4, 8), timeout_s=5)
    await q.clear("a")
    await q.create_partition("b", range(4, 8))


async def test_closing_refuses_those_who_wait_for_room() -> None:
    q = await filled(queue(capacity_rows=4), range(4))
    waiting = await soon(q.create_partition("b", [9]))
    await q.close()
    with pytest.raises(QueueClosed):
        await waiting


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


async def test_a_partition_with_leased_rows_out_cannot_be_cleared() -> None:
    q = await filled(queue(score=TaskSpec(("reward",), lease_s=10)), range(2))
    batch = await q.get("score", 2, consumer="e0")
    assert batch is not None
    with pytest.raises(ValueError, match="consumer 'e0' of task 'score' holds"):
        await q.clear("a")
    await q.acknowledge(batch.lease)
    await q.clear("a")
    await q.acknowledge(batch.lease)


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


def test_a_policy_takes_nothing_where_it_cannot_take_enough() -> None:
    for name, make in POLICIES.items():
        policy = make(100_000)
        policy.add(np.arange(100_000), 1)
        taken = policy.take(16, 16, 100_000)
        assert taken is not None and taken.tolist() == list(range(16)), name
        assert policy.take(16, 16, 20) is None and len(policy) == 100_000 - 16
