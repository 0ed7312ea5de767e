"""Several queues as one: partitions are spread, leases find their way back, and nothing is handed out twice."""

from __future__ import annotations

import numpy as np
import pytest

from harness.transfer_queue import Batch, ColumnSpec, LocalQueue, QueueSpec, TaskSpec
from harness.transfer_queue.sharded import ShardedQueue

SPEC = QueueSpec({"reward": ColumnSpec("float32")}, {"train": TaskSpec(("reward",), lease_s=60)})
NAMES = [f"train_{i}" for i in range(12)]


async def filled() -> tuple[ShardedQueue, list[LocalQueue]]:
    shards = [LocalQueue(SPEC) for _ in range(3)]
    queue = ShardedQueue(shards)
    for i, name in enumerate(NAMES):
        await queue.create_partition(name, range(4 * i, 4 * i + 4))
        await queue.put(name, range(4 * i, 4 * i + 4), {"reward": np.ones(4, np.float32)})
    return queue, shards


async def take(queue: ShardedQueue, name: str) -> Batch:
    batch = await queue.get("train", 3, partition=name)
    assert batch is not None
    return batch


async def test_partitions_are_spread_over_all_shards() -> None:
    _, shards = await filled()
    held = [list((await shard.describe())["partitions"]) for shard in shards]
    assert sorted(name for names in held for name in names) == sorted(NAMES)
    assert all(held)


async def test_each_lease_is_acknowledged_where_it_was_given() -> None:
    queue, _ = await filled()
    batches = [await take(queue, name) for name in NAMES]
    assert len({batch.lease for batch in batches}) == len(NAMES)
    for batch in batches[::2]:
        await queue.acknowledge(batch.lease)
    for batch in batches[1::2]:
        await queue.give_back(batch.lease)
    again = [await take(queue, name) for name in NAMES]
    assert [len(batch) for batch in again] == [1, 3] * 6
    assert [batch.rows[0] for batch in again[1::2]] == [batch.rows[0] for batch in batches[1::2]]


async def test_all_shards_are_cleared_and_closed_together() -> None:
    queue, _ = await filled()
    for name in NAMES:
        for batch in (await take(queue, name), await take(queue, name)):
            await queue.acknowledge(batch.lease)
    assert sorted(await queue.clear_finished()) == sorted(NAMES)
    await queue.close()
    assert all(told["closed"] and not told["partitions"] for told in (await queue.describe()).values())


async def test_a_get_has_to_name_its_partition() -> None:
    queue, _ = await filled()
    with pytest.raises(ValueError, match="'train' from 3 shards has to name its partition"):
        await queue.get("train", 1)


async def test_shards_of_different_specs_are_refused() -> None:
    other = LocalQueue(QueueSpec({"reward": ColumnSpec("float64")}, {"train": TaskSpec(("reward",))}))
    for shards in ([], [LocalQueue(SPEC), other]):
        with pytest.raises(ValueError, match="queues of the same spec"):
            ShardedQueue(shards)
