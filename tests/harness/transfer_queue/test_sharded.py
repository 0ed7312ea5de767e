"""Several queues as one: partitions are spread, leases find their way back, and nothing is handed out twice."""

from __future__ import annotations

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, LocalQueue, QueueSpec, TaskSpec
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


async def test_partitions_are_spread_over_all_shards() -> None:
    _, shards = await filled()
    held = [list((await shard.describe())["partitions"]) for shard in shards]
    assert sorted(name for names in held for name in names) == sorted(NAMES)
    assert all(held)


async def test_a_get_has_to_name_its_partition() -> None:
    queue, _ = await filled()
    with pytest.raises(ValueError, match="'train' from 3 shards has to name its partition"):
        await queue.get("train", 1)


async def test_shards_of_different_specs_are_refused() -> None:
    other = LocalQueue(QueueSpec({"reward": ColumnSpec("float64")}, {"train": TaskSpec(("reward",))}))
    for shards in ([], [LocalQueue(SPEC), other]):
        with pytest.raises(ValueError, match="queues of the same spec"):
            ShardedQueue(shards)
