"""Who goes first, who is dropped, what is retired and who waits: the contract's sentences on these, in one loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.transfer_queue import Ragged, TaskSpec
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.rows.columns import Column
from tests.support.local_queue import filled, ids, queue, rewards, soon, virtual

COMPLETION = TaskSpec(("reward",), policy="completion")


def tokens(rows: list[int]) -> dict[str, Column]:
    return {"tokens": Ragged.from_rows([[row] for row in rows], "int64")}  # type: ignore[list-item]


async def waits(task: asyncio.Task[Any]) -> bool:
    """Whether it still waits once every task has had a turn."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def started(*, train: TaskSpec | None = None, groups: int = 4, **more: TaskSpec) -> LocalQueue:
    """Groups of two rows in "a" (0..) and "b" (100..): "old" took the first of each under bound 2, then 102; "new" took
    the second of "a" under bound 4."""
    q = queue(
        roll=TaskSpec(("tokens",), whole_groups=True),
        train=train or TaskSpec(("reward",), policy="completion", whole_groups=True),
        **more,
    )
    for name, first in (("a", 0), ("b", 100)):
        rows = list(range(first, first + 2 * groups))
        await q.create_partition(name, rows, group_size=2)
        await q.put(name, rows, tokens(rows))
    for consumer, below, partition in (("old", 2, "a"), ("new", 4, "a"), ("old", 102, "b")):
        await q.set_bound("roll", consumer, below)
        await q.get("roll", 2, consumer=consumer, partition=partition)
    return q


# -- completion order


@virtual
async def test_completion_hands_out_rows_in_the_order_in_which_they_became_ready() -> None:
    q = queue(score=COMPLETION)
    await q.create_partition("a", range(6))
    for rows in ([5], [2, 4], [0]):
        await q.put("a", rows, rewards(rows))
    assert ids(await q.get("score", 3)) == [5, 2, 4]
    assert ids(await q.get("score", 3, minimum=1)) == [0]


@virtual
async def test_completion_goes_to_the_partition_that_was_ready_first_and_takes_no_more_than_is_asked() -> None:
    q = queue(score=COMPLETION)
    await q.create_partition("a", range(4))
    await q.create_partition("b", range(10, 14))
    for name, rows in (("b", [12]), ("a", [1]), ("b", [10, 11]), ("a", [0])):
        await q.put(name, rows, rewards(rows))
    assert ids(await q.get("score", 2, minimum=1)) == [12, 10]
    assert ids(await q.get("score", 2, minimum=1)) == [1, 0]
    assert ids(await q.get("score", 2, minimum=1)) == [11]


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


@virtual
async def test_completion_passes_over_a_partition_that_has_less_than_the_minimum() -> None:
    q = queue(score=COMPLETION)
    await q.create_partition("a", range(4))
    await q.create_partition("b", range(10, 14))
    for name, rows in (("a", [3]), ("b", [10]), ("b", [13])):
        await q.put(name, rows, rewards(rows))
    assert ids(await q.get("score", 2)) == [10, 13]


@virtual
async def test_rows_that_come_back_keep_their_place_in_the_order_of_completion() -> None:
    q = queue(score=COMPLETION)
    await q.create_partition("a", range(4))
    for row in (3, 1, 0):
        await q.put("a", [row], rewards([row]))
    batch = await q.get("score", 1)
    assert batch is not None and ids(batch) == [3]
    await q.give_back(batch.lease)
    assert ids(await q.get("score", 3)) == [3, 1, 0]


@virtual
async def test_a_bound_holds_for_the_order_of_completion() -> None:
    q = queue(score=COMPLETION)
    await q.create_partition("a", range(4))
    await q.create_partition("b", range(10, 14))
    for name, rows in (("b", [13]), ("a", [3]), ("b", [10]), ("a", [0])):
        await q.put(name, rows, rewards(rows))
    await q.set_bound("score", "e0", 12)
    assert ids(await q.get("score", 4, minimum=1, consumer="e0")) == [3, 0]
    assert ids(await q.get("score", 4, minimum=1, consumer="e0")) == [10]


# -- first


@virtual
async def test_what_was_started_under_the_bound_goes_first_and_is_waited_for() -> None:
    q = await started()
    await q.put("a", [2, 3, 4, 5], rewards([2, 3, 4, 5]))
    get = await soon(q.get("train", 4, minimum=2, first=("roll", ((2, 0),))))
    assert await waits(get), "0 and 1 were started under bound 2 and are not ready"
    assert ids(await q.get("train", 2, minimum=2)) == [2, 3], "who does not ask for them first goes on"
    await q.put("a", [0, 1], rewards([0, 1]))
    assert ids(await get) == [0, 1], "and nothing else with them"
    assert ids(await q.get("train", 4, minimum=2, first=("roll", ((2, 0),)))) == [4, 5]


@virtual
@pytest.mark.parametrize("policy", ["fifo", "ready", "completion"])
async def test_of_several_that_go_first_those_that_are_ready_go_wherever_they_are(policy: str) -> None:
    q = await started(train=TaskSpec(("reward",), policy=policy, whole_groups=True))
    await q.put("a", [6, 7], rewards([6, 7]))
    await q.put("b", [100, 101], rewards([100, 101]))
    assert ids(await q.get("train", 4, minimum=2, first=("roll", ((102, 0),)))) == [100, 101]
    rest = await soon(q.get("train", 4, minimum=4, first=("roll", ((102, 0),))))
    await q.put("a", [2, 3], rewards([2, 3]))
    assert await waits(rest)
    await q.put("a", [0, 1], rewards([0, 1]))
    assert ids(await rest) == ([2, 3, 0, 1] if policy == "completion" else [0, 1, 2, 3])


@pytest.mark.parametrize("policy", ["fifo", "ready", "completion"])
@virtual
async def test_less_than_the_minimum_goes_where_it_is_all_of_what_goes_first(policy: str) -> None:
    q = await started(train=TaskSpec(("reward",), policy=policy, whole_groups=True))
    rows = list(range(8))
    await q.put("a", rows[::-1], rewards(rows[::-1]))
    assert ids(await q.get("train", 8, partition="a", first=("roll", ((3, 0),)))) == [0, 1]
    assert ids(await q.get("train", 4, partition="a", first=("roll", ((4, 0),)))) == [2, 3]
    assert ids(await q.get("train", 4, partition="a", first=("roll", ((4, 0),)))) == [4, 5, 6, 7]


@virtual
async def test_fifo_goes_on_past_what_went_first() -> None:
    q = queue(roll=TaskSpec(("tokens",), policy="ready"), train=TaskSpec(("reward",)))
    await q.create_partition("a", range(4))
    await q.put("a", [2], tokens([2]))
    await q.set_bound("roll", "e0", 3)
    await q.get("roll", 1, consumer="e0")
    await q.put("a", [2, 0, 1], rewards([2, 0, 1]))
    first = await q.get("train", 1, first=("roll", ((3, 0),)))
    assert first is not None and ids(first) == [2]
    get = await soon(q.get("train", 3))
    await q.put("a", [3], rewards([3]))
    assert ids(await get) == [0, 1, 3]
    await q.give_back(first.lease)
    assert ids(await q.get("train", 1)) == [2]


@virtual
async def test_a_hand_out_of_the_other_task_changes_what_a_waiting_get_is_given() -> None:
    q = await started()
    await q.put("b", [102, 103], rewards([102, 103]))
    get = await soon(q.get("train", 4, first=("roll", ((104, 0),)), partition="b"))
    await q.put("b", [100, 101], rewards([100, 101]))
    assert ids(await get) == [100, 101], "one of two groups is enough: it is all that goes first"
    get = await soon(q.get("train", 4, first=("roll", ((104, 0),)), partition="b"))
    assert await waits(get)
    await q.set_bound("roll", "e1", 104)
    await q.get("roll", 2, consumer="e1", partition="b")
    assert ids(await get) == [102, 103]


@pytest.mark.parametrize("how", ["give_back", "release"])
@virtual
async def test_what_came_back_is_not_waited_for(how: str) -> None:
    q = await started()
    await q.set_bound("roll", "lost", 104)
    batch = await q.get("roll", 2, consumer="lost", partition="b")
    assert batch is not None and ids(batch) == [102, 103]
    await q.put("b", [100, 101, 104, 105], rewards([100, 101, 104, 105]))
    assert ids(await q.get("train", 2, partition="b", first=("roll", ((104, 0),)))) == [100, 101]
    get = await soon(q.get("train", 2, partition="b", first=("roll", ((104, 0),))))
    assert await waits(get)
    await (q.give_back(batch.lease) if how == "give_back" else q.release("lost"))
    assert ids(await get) == [104, 105]
    assert await q.drop("train", "roll", 104) == [0, 1, 2, 3]


@virtual
async def test_what_was_handed_out_without_a_bound_does_not_go_first() -> None:
    q = await started()
    assert ids(await q.get("roll", 2, consumer="free", partition="a")) == [4, 5]
    assert await q.drop("train", "roll", 10**9) == [0, 1, 2, 3, 100, 101]


@virtual
async def test_a_group_goes_first_if_one_of_its_rows_was_started() -> None:
    q = queue(roll=TaskSpec(("tokens",)), train=TaskSpec(("reward",), policy="ready", whole_groups=True))
    await q.create_partition("a", range(6), group_size=2)
    await q.put("a", range(6), tokens(list(range(6))) | rewards(range(6)))
    await q.get("roll", 2)
    await q.set_bound("roll", "e0", 3)
    await q.get("roll", 1, consumer="e0")
    assert ids(await q.get("train", 2, first=("roll", ((3, 0),)))) == [2, 3]


@virtual
async def test_a_cancelled_get_takes_nothing_of_what_goes_first() -> None:
    q = await started()
    get = await soon(q.get("train", 2, first=("roll", ((2, 0),))))
    await q.put("a", [0, 1, 2, 3], rewards([0, 1, 2, 3]))  # answers it; it has not run since
    get.cancel()
    with pytest.raises(asyncio.CancelledError):
        await get
    assert ids(await q.get("train", 4, first=("roll", ((2, 0),)))) == [0, 1]
    assert ids(await q.get("train", 2)) == [2, 3]


@virtual
async def test_a_timeout_names_the_rows_that_go_first_and_what_they_lack() -> None:
    q = await started()
    with pytest.raises(TimeoutError) as error:
        await q.get("train", 2, partition="a", first=("roll", ((2, 0),)), timeout_s=3)
    assert str(error.value) == (
        "after 3 s: task 'train' waits for 2 rows, first for these 2 of partition 'a', which task 'roll' was handed "
        "under a bound of 2 or less: [0, 1]; it reads reward; rows that lack a column: {'reward': 8}"
    )
    with pytest.raises(TimeoutError, match="waits for 2 rows of partition 'a': 0 of the 8 rows left are ready"):
        await q.get("train", 4, partition="a", first=("roll", ((2, 4), (4, 8))), timeout_s=3)


@pytest.mark.parametrize(
    ("task", "first", "message"),
    [
        ("train", ("nobody", ((2, 0),)), "task 'nobody' is unknown"),
        ("ranks", ("roll", ((2, 0),)), "task 'ranks' has 2 ranks and cannot get what comes first"),
    ],
)
@virtual
async def test_a_first_that_cannot_be_is_refused(task: str, first: Any, message: str) -> None:
    q = await started(ranks=TaskSpec(("reward",), ranks=2))
    with pytest.raises(ValueError, match=message):
        await q.get(task, 2, first=first)


# -- first, as far as there is room


@virtual
async def test_others_go_before_what_is_due_as_long_as_they_fit() -> None:
    """0 and 1 are due within six: four rows may go before them, wherever these are."""
    q = await started()
    await q.put("a", [6, 7, 4, 5], rewards([6, 7, 4, 5]))
    await q.put("b", [104, 105], rewards([104, 105]))
    assert ids(await q.get("train", 2, first=("roll", ((2, 6),)))) == [4, 5]
    assert ids(await q.get("train", 2, first=("roll", ((2, 4),)))) == [6, 7]
    get = await soon(q.get("train", 2, first=("roll", ((2, 2),))))
    assert await waits(get)
    await q.put("a", [0, 1], rewards([0, 1]))
    assert ids(await get) == [0, 1]
    assert ids(await q.get("train", 2, first=("roll", ((2, 0),)))) == [104, 105], "nothing is due any more"


@virtual
async def test_one_batch_does_not_take_more_than_fits_before_what_is_due_even_if_more_were_asked_for() -> None:
    q = await started()
    await q.put("a", range(2, 8), rewards(range(2, 8)))
    assert ids(await q.get("train", 6, minimum=6, first=("roll", ((2, 6),)))) == [2, 3, 4, 5]


@pytest.mark.parametrize("within", [3, 2, 1, -4])
@virtual
async def test_less_room_than_a_unit_is_none_and_what_is_too_late_goes_first_all_the_same(within: int) -> None:
    q = await started()
    await q.put("a", range(2, 8), rewards(range(2, 8)))
    get = await soon(q.get("train", 4, first=("roll", ((2, within),))))
    assert await waits(get)
    await q.put("a", [0, 1], rewards([0, 1]))
    assert ids(await get) == [0, 1]


@virtual
async def test_of_several_pairs_the_lowest_without_room_goes_first_whatever_their_order() -> None:
    q = await started()
    await q.put("a", range(2, 8), rewards(range(2, 8)))
    get = await soon(q.get("train", 4, first=("roll", ((4, 0), (2, 2)))))
    assert await waits(get), "2 and 3 are as late, and are of the higher bound only"
    await q.put("a", [0, 1], rewards([0, 1]))
    assert ids(await get) == [0, 1]
    assert ids(await q.get("train", 4, first=("roll", ((2, 0), (4, 0))))) == [2, 3]


@virtual
async def test_what_is_due_at_a_higher_bound_leaves_room_for_what_is_due_at_a_lower_one() -> None:
    """Four groups are due, one of them within its own and one more: only one other goes before that."""
    q = await started()
    for consumer, below in (("e0", 6), ("e1", 8)):
        await q.set_bound("roll", consumer, below)
        await q.get("roll", 2, consumer=consumer, partition="a")
    await q.put("a", range(2, 8), rewards(range(2, 8)))
    assert ids(await q.get("train", 6, partition="a", first=("roll", ((2, 4), (8, 8))))) == [2, 3]
    get = await soon(q.get("train", 6, partition="a", first=("roll", ((2, 2), (8, 6)))))
    assert await waits(get)
    get.cancel()


@virtual
async def test_what_others_are_handed_meanwhile_uses_up_the_room_and_what_comes_back_restores_it() -> None:
    q = await started()
    get = await soon(q.get("train", 2, first=("roll", ((2, 4),))))
    twin = await soon(q.get("train", 2, first=("roll", ((2, 4),))))
    await q.put("a", [4, 5], rewards([4, 5]))
    batch = await get
    assert batch is not None and ids(batch) == [4, 5]
    await q.put("a", [6, 7], rewards([6, 7]))
    assert await waits(twin), "its next four are 4 and 5 and what is due"
    await q.give_back(batch.lease)
    assert ids(await twin) == [4, 5]


@virtual
async def test_what_another_task_is_handed_can_take_the_room_of_a_waiting_get() -> None:
    q = await started()
    get = await soon(q.get("train", 2, partition="b", first=("roll", ((104, 4),))))
    await q.set_bound("roll", "e0", 104)
    await q.get("roll", 2, consumer="e0", partition="b")
    await q.put("b", [104, 105], rewards([104, 105]))
    assert await waits(get), "four rows are due within four"
    await q.put("b", [102, 103], rewards([102, 103]))
    assert ids(await get) == [102, 103]


@virtual
async def test_a_named_partition_leaves_out_what_is_due_elsewhere() -> None:
    q = await started()
    await q.put("b", range(100, 108), rewards(range(100, 108)))
    assert ids(await q.get("train", 2, partition="b", first=("roll", ((2, 0),)))) == [100, 101]


# -- drop


@virtual
async def test_dropped_rows_never_go_out_for_the_task_and_all_others_get_them() -> None:
    q = await started(score=TaskSpec(("reward",)))
    await q.put("a", [0], rewards([0]))
    assert await q.drop("train", "roll", 2) == [0, 1]
    assert await q.drop("train", "roll", 2) == []
    await q.put("a", range(1, 8), rewards(range(1, 8)))
    assert ids(await q.get("train", 8, partition="a")) == [2, 3, 4, 5, 6, 7]
    assert await q.get("train", 8, partition="a") is None
    assert ids(await q.get("score", 8, partition="a")) == list(range(8))


@virtual
async def test_what_a_task_was_handed_cannot_be_dropped_any_more() -> None:
    q = await started()
    await q.put("a", [0, 1], rewards([0, 1]))
    batch = await q.get("train", 2)
    assert batch is not None and await q.drop("train", "roll", 2) == []
    await q.give_back(batch.lease)
    assert await q.drop("train", "roll", 2) == [0, 1]


@pytest.mark.parametrize("policy", ["fifo", "ready", "completion"])
@virtual
async def test_no_get_waits_for_the_turn_of_dropped_rows(policy: str) -> None:
    q = await started(train=TaskSpec(("reward",), policy=policy, whole_groups=True))
    get = await soon(q.get("train", 6, partition="a"))
    await q.put("a", range(2, 8), rewards(range(2, 8)))
    assert await waits(get) is (policy == "fifo")
    await q.drop("train", "roll", 2)
    assert ids(await get) == [2, 3, 4, 5, 6, 7]


@virtual
async def test_a_drop_that_exhausts_a_partition_answers_those_who_wait_for_it() -> None:
    q = await started(groups=2)
    get = await soon(q.get("train", 2, partition="a"))
    assert await q.drop("train", "roll", 4) == [0, 1, 2, 3]
    assert await get is None


@virtual
async def test_describe_counts_dropped_rows() -> None:
    q = await started()
    await q.drop("train", "roll", 4)
    described = (await q.describe())["partitions"]["a"]["tasks"]["train"]
    assert described == {"ready": 0, "handed_out": 0, "done": 0, "dropped": 4, "depth": 4, "missing": {"reward": 8}}


@virtual
async def test_a_drop_that_cannot_be_is_refused() -> None:
    q = await started(ranks=TaskSpec(("reward",), ranks=2))
    for task, other, message in (
        ("nobody", "roll", "'nobody' is unknown"),
        ("train", "nobody", "'nobody' is unknown"),
        ("ranks", "roll", "task 'ranks' has 2 ranks and cannot drop rows"),
    ):
        with pytest.raises(ValueError, match=message):
            await q.drop(task, other, 2)


# -- retiring partitions


@virtual
async def test_finished_partitions_are_cleared_when_asked() -> None:
    q = await filled(queue(score=TaskSpec(("reward",))), range(2))
    await filled(q, range(10, 14), "b")
    assert await q.clear_finished() == []
    await q.get("score", 2)
    assert await q.clear_finished() == ["a"]
    assert list((await q.describe())["partitions"]) == ["b"]


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
async def test_a_partition_that_was_finished_before_makes_room_at_once() -> None:
    q = await filled(queue(4, score=TaskSpec(("reward",))), range(4))
    await q.get("score", 4)
    await q.create_partition("b", range(10, 12), timeout_s=1)
    assert list((await q.describe())["partitions"]) == ["b"]


@virtual
async def test_a_dropped_row_keeps_its_partition_until_all_that_its_task_reads_is_written() -> None:
    q = queue(roll=TaskSpec(("tokens",)), train=TaskSpec(("tokens", "reward")))
    await q.create_partition("a", range(2))
    await q.set_bound("roll", "e0", 2)
    await q.put("a", range(2), tokens([0, 1]))
    await q.get("roll", 2, consumer="e0")
    assert await q.drop("train", "roll", 2) == [0, 1]
    assert await q.clear_finished() == []
    await q.put("a", range(2), rewards(range(2)))
    assert await q.clear_finished() == ["a"]


@virtual
async def test_a_partition_is_kept_for_a_rank_that_has_still_to_collect_its_share() -> None:
    q = await filled(queue(train=TaskSpec(("reward",), ranks=2)), range(4))
    assert ids(await q.get("train", 2, rank=0)) == [0, 1]
    assert await q.clear_finished() == []
    assert ids(await q.get("train", 2, rank=1)) == [2, 3]
    assert await q.clear_finished() == ["a"]


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


@virtual
async def test_waiting_readers_of_different_bounds_are_served_in_the_order_they_came() -> None:
    q = queue()
    await q.create_partition("a", range(8))
    for consumer, below in (("e0", 2), ("e2", 2)):
        await q.set_bound("score", consumer, below)
    gets = [await soon(q.get("score", 1, consumer=f"e{i}")) for i in range(4)]
    await q.put("a", range(4), rewards(range(4)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [get.done() for get in gets] == [True, True, False, True]
    assert [ids(await gets[i]) for i in (0, 1, 3)] == [[0], [1], [2]]
    await q.set_bound("score", "e2", 4)
    assert ids(await gets[2]) == [3]


@virtual
async def test_a_reader_whose_bound_was_raised_is_not_held_up_by_one_whose_bound_was_not() -> None:
    q = queue()
    await q.create_partition("a", range(4))
    for consumer in ("e0", "e1"):
        await q.set_bound("score", consumer, 0)
    low, raised = [await soon(q.get("score", 2, consumer=consumer)) for consumer in ("e0", "e1")]
    await q.set_bound("score", "e1", 4)
    await q.put("a", range(2), rewards(range(2)))
    assert ids(await raised) == [0, 1]
    assert await waits(low)
    low.cancel()


@virtual
async def test_a_reader_that_gave_up_does_not_hold_up_those_behind_it() -> None:
    q = queue()
    await q.create_partition("a", range(2))
    first, second = [await soon(q.get("score", 2)) for _ in range(2)]
    first.cancel()  # it has not run since: it still stands in its line
    await q.put("a", range(2), rewards(range(2)))
    assert ids(await second) == [0, 1]


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


@virtual
async def test_rows_are_named_by_the_one_reader_of_a_task_and_counted() -> None:
    q = queue(score=TaskSpec(("reward",), ranks=2), train=TaskSpec(("reward",)))
    with pytest.raises(ValueError, match="has 2 ranks and cannot get rows by their ids"):
        await q.get("score", 2, only=(2, 3))
    with pytest.raises(ValueError, match="a get of only 2 rows takes count=2"):
        await q.get("train", 4, only=(2, 3))
