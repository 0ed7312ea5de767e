"""The streaming loader: every batch once and again for each epoch, in an event loop, in a thread, and in PyTorch."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from torch.utils.data import DataLoader

from harness.transfer_queue import Batch, ColumnSpec, LeaseExpired, LocalQueue, QueueSpec, TaskSpec
from harness.transfer_queue.loader import StreamingDataLoader

SPEC = QueueSpec({"reward": ColumnSpec("float32")}, {"train": TaskSpec(("reward",), lease_s=60)})


async def filled(**partitions: range) -> LocalQueue:
    queue = LocalQueue(SPEC)
    for name, rows in partitions.items():
        await queue.create_partition(name, rows)
        await queue.put(name, rows, {"reward": np.array(rows, np.float32)})
    return queue


def rows(batches: list[Batch]) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


async def test_it_ends_when_its_partition_is_exhausted_and_reads_the_next_one_when_told() -> None:
    loader = StreamingDataLoader(await filled(a=range(5), b=range(10, 12)), "train", 2, partition="a")
    assert rows([batch async for batch in loader]) == [[0, 1], [2, 3], [4]]
    loader.set_partition("b")
    assert rows([batch async for batch in loader]) == [[10, 11]]


async def test_without_a_partition_it_ends_when_the_queue_is_closed_and_empty() -> None:
    queue = await filled(a=range(2), b=range(10, 12))
    await queue.close()
    assert rows([batch async for batch in StreamingDataLoader(queue, "train", 2)]) == [[0, 1], [10, 11]]


async def test_it_gives_a_batch_as_soon_as_it_is_ready() -> None:
    queue = LocalQueue(SPEC)
    await queue.create_partition("a", range(4))
    stream = aiter(StreamingDataLoader(queue, "train", 2, partition="a"))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await queue.put("a", [0, 1], {"reward": np.zeros(2, np.float32)})
    assert (await first).rows.tolist() == [0, 1]
    await stream.aclose()  # type: ignore[attr-defined]


async def test_every_epoch_repeats_the_batches_of_the_first_without_asking_the_queue() -> None:
    loader = StreamingDataLoader(await filled(a=range(4)), "train", 2, partition="a", epochs=3)
    assert rows([batch async for batch in loader]) == [[0, 1], [2, 3]] * 3


async def test_replay_holds_no_more_than_its_window() -> None:
    loader = StreamingDataLoader(await filled(a=range(10)), "train", 2, partition="a", epochs=2, window_rows=4)
    first, second, last = [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]
    assert rows([batch async for batch in loader]) == first * 2 + second * 2 + last * 2


async def test_a_batch_is_acknowledged_when_the_next_is_asked_for() -> None:
    queue = await filled(a=range(4))
    stream = aiter(StreamingDataLoader(queue, "train", 2, consumer="w", partition="a"))
    await anext(stream)
    held = await anext(stream)
    await queue.release("w")
    again = await queue.get("train", 4)
    assert again is not None and again.rows.tolist() == held.rows.tolist() == [2, 3]
    with pytest.raises(LeaseExpired):
        await anext(stream)


async def test_a_thread_without_an_event_loop_iterates_the_queue_of_another() -> None:
    loader = StreamingDataLoader(await filled(a=range(5)), "train", 2, partition="a")
    assert rows(await asyncio.to_thread(list, loader)) == [[0, 1], [2, 3], [4]]


async def test_the_thread_of_the_queues_own_loop_is_told_to_await() -> None:
    loader = StreamingDataLoader(await filled(a=range(5)), "train", 2, partition="a")
    with pytest.raises(RuntimeError, match="use `await` or `async for`"):
        next(iter(loader))


def test_pytorchs_data_loader_takes_it_as_it_is() -> None:
    loader = StreamingDataLoader(asyncio.run(filled(a=range(5))), "train", 2, partition="a", epochs=2)
    batches = list(DataLoader(loader, batch_size=None, num_workers=0))
    assert rows(batches) == [[0, 1], [2, 3], [4]] * 2
    assert batches[0].torch("reward").tolist() == [0, 1]


async def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0 and None"):
        StreamingDataLoader(LocalQueue(SPEC), "train", 2, epochs=0)


def test_a_worker_that_would_read_a_copy_of_the_queue_is_refused() -> None:
    loader = StreamingDataLoader(asyncio.run(filled(a=range(5))), "train", 2, partition="a")
    with pytest.raises(RuntimeError, match="has a copy of it: workers share a queue that runs in a process of its own"):
        list(DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork"))
