"""Where ranks meet: agreements in one order, counts that are waited for."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.runtime.virtual_runtime import run_virtual
from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.service.meetings import Meetings
from tests.support.local_queue import virtual


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), unique=True, max_size=18))
def test_what_all_ranks_asked_for_is_numbered_in_the_order_of_the_last(asked: list[tuple[int, int]]) -> None:
    async def play() -> None:
        meetings, found = Meetings(), list[tuple[int, int, int]]()

        async def ask(rank: int, what: int) -> None:
            found.append((await meetings.agree("actor", f"turn {what}", rank, 3), what, rank))

        tasks, complete = [], list[int]()
        for rank, what in asked:
            tasks.append(asyncio.create_task(ask(rank, what)))
            await asyncio.sleep(1)
            if sum(other == what for _, other in asked[: len(tasks)]) == 3:
                complete.append(what)
        assert sorted(found) == sorted((n, what, rank) for n, what in enumerate(complete, 1) for rank in range(3))
        for _, what in asked:
            there = {rank for rank, other in asked if other == what}
            lacking = [] if what in complete else [rank for rank in range(3) if rank not in there]
            assert meetings.lacking("actor", f"turn {what}", 3) == lacking
        for task in tasks:
            task.cancel()

    run_virtual(play())


@virtual
async def test_a_rank_asks_once_and_one_that_has_gone_is_answered_no_more() -> None:
    meetings = Meetings()
    gone = asyncio.create_task(meetings.agree("actor", "a", 0, 2))
    await asyncio.sleep(0)
    gone.cancel()
    for rank in (0, 2, -1):
        with pytest.raises(ValueError, match=f"rank {rank} of 2 cannot ask for a of actor"):
            await meetings.agree("actor", "a", rank, 2)
    assert await meetings.agree("actor", "a", 1, 2) == 1
    assert await meetings.agree("critic", "a", 0, 1) == 1, "each world counts for itself"


@virtual
async def test_a_count_is_waited_for_and_never_falls() -> None:
    meetings = Meetings()
    assert await meetings.reached("engine 0", "begun", 0) == 0
    waiting = [asyncio.create_task(meetings.reached("engine 0", "begun", least)) for least in (1, 2, 9)]
    await asyncio.sleep(1)
    waiting[0].cancel()
    meetings.note("engine 0", "begun", 3)
    await asyncio.sleep(1)
    assert waiting[1].result() == 3 and not waiting[2].done()
    with pytest.raises(ValueError, match="begun of engine 0 is at 3, and cannot fall to 2"):
        meetings.note("engine 0", "begun", 2)
    waiting[2].cancel()


async def test_ranks_meet_at_the_queue_by_the_tokens_that_workers_have() -> None:
    spec = QueueSpec(columns={"reward": ColumnSpec("float32")}, tasks={"train": TaskSpec(("reward",))})
    with QueueProcess.start(spec) as process:
        first, second = process.queue.for_role("writer"), process.queue.for_role("reader")
        asked = asyncio.create_task(first.agree("actor", "a", 0, 2))
        await first.note("engine 0", "begun", 4)
        assert await second.reached("engine 0", "begun", 1) == 4
        assert await second.lacking("actor", "a", 2) == [1]
        assert [await second.agree("actor", "a", 1, 2), await asked] == [1, 1]
        late = asyncio.create_task(second.reached("engine 0", "begun", 5))
        await asyncio.sleep(0.1)
        process.kill()
        with pytest.raises(ConnectionError, match="is lost"):
            await late
