"""A task that nobody waits for: it looks at rows, gives them back, and is told later that they are finished."""

import asyncio
import math

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.control.reporting import queue_metrics
from harness.transfer_queue.local import LocalQueue
from tests.support.local_queue import filled, virtual
from tests.support.remote_queue import serving

SPEC = QueueSpec(
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
    queue = LocalQueue(SPEC)
    await trained(queue, "a", range(4))
    described = await queue.describe()
    assert described["depth_samples"] == 0 and not [name for name in queue_metrics(described) if "record" in name]
    await filled(queue, range(4, 8), "b", 2)  # would wait for ever, were there no room
    batch = await queue.get("record", 2, only=(3, 1), consumer="recorder")
    assert batch is not None and batch.dense("reward").tolist() == [1, 3]
    assert await queue.clear_finished() == []


@virtual
async def test_what_was_given_back_is_read_again_and_freed_once_it_is_finished() -> None:
    queue = LocalQueue(SPEC)
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
    queue = LocalQueue(SPEC)
    await trained(queue, "a", range(2))
    await queue.create_partition("b", range(2, 4), 2)
    await queue.finish("record", [3, 0, 1, 2])
    assert await queue.clear_finished() == ["a"], "what is still to be written of b would come too late"
    await queue.put("b", range(2, 4), {"reward": np.zeros(2, np.float32)})
    assert await queue.get("train", 2) is not None and await queue.clear_finished() == ["b"]
    queue = await filled(LocalQueue(SPEC), range(2), group_size=2)
    await filled(queue, range(2, 4), "b", 2)
    first = await queue.get("record", 3, only=(3, 0, 2))
    rest = await queue.get("record", 1, only=(0,))
    assert first is not None and first.rows.tolist() == [2, 3] and rest is not None and rest.rows.tolist() == [0]


@virtual
async def test_what_somebody_has_is_in_no_partition_or_is_part_of_a_group_cannot_be_finished() -> None:
    queue = LocalQueue(SPEC)
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
    queue = await filled(LocalQueue(SPEC), range(4), group_size=2)
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
