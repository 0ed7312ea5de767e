"""The streaming loader: every batch once and again for each epoch, in an event loop, in a thread, and in PyTorch."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader

from harness.transfer_queue import Batch, ColumnSpec, GetRequest, LeaseExpired, QueueSpec, TaskSpec
from harness.transfer_queue.loader import StreamingDataLoader
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.remote.sync_client import SyncQueue
from tests.support import local_queue

SPEC = QueueSpec({"reward": ColumnSpec("float32")}, {"train": TaskSpec(("reward",), lease_s=60)})


async def filled(**partitions: range) -> LocalQueue:
    queue = LocalQueue(SPEC)
    for name, rows in partitions.items():
        await local_queue.filled(queue, rows, name)
    return queue


def rows(batches: list[Batch]) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


async def test_it_ends_with_its_partition_or_with_the_queue() -> None:
    loader = StreamingDataLoader(await filled(a=range(5), b=range(10, 12)), GetRequest("train", 2, partition="a"))
    assert rows([batch async for batch in loader]) == [[0, 1], [2, 3], [4]]
    loader.set_partition("b")
    assert rows([batch async for batch in loader]) == [[10, 11]]
    queue = await filled(a=range(2), b=range(10, 12))
    await queue.close()
    assert rows([batch async for batch in StreamingDataLoader(queue, GetRequest("train", 2))]) == [[0, 1], [10, 11]]


async def test_every_epoch_repeats_the_first_within_its_window() -> None:
    loader = StreamingDataLoader(await filled(a=range(4)), GetRequest("train", 2, partition="a"), epochs=3)
    assert rows([batch async for batch in loader]) == [[0, 1], [2, 3]] * 3
    get = GetRequest("train", 2, partition="a")
    loader = StreamingDataLoader(await filled(a=range(10)), get, epochs=2, window_rows=4)
    first, second, last = [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]
    assert rows([batch async for batch in loader]) == first * 2 + second * 2 + last * 2


async def test_a_batch_is_acknowledged_when_the_next_is_asked_for() -> None:
    queue = await filled(a=range(4))
    stream = aiter(StreamingDataLoader(queue, GetRequest("train", 2, consumer="w", partition="a")))
    await anext(stream)
    held = await anext(stream)
    await queue.release("w")
    again = await queue.get("train", 4)
    assert again is not None and again.rows.tolist() == held.rows.tolist() == [2, 3]
    with pytest.raises(LeaseExpired):
        await anext(stream)


async def test_a_thread_iterates_the_queue_of_another_loop_and_not_of_its_own() -> None:
    loader = StreamingDataLoader(await filled(a=range(5)), GetRequest("train", 2, partition="a"))
    assert rows(await asyncio.to_thread(list, loader)) == [[0, 1], [2, 3], [4]]
    loader = StreamingDataLoader(await filled(a=range(5)), GetRequest("train", 2, partition="a"))
    with pytest.raises(RuntimeError, match="use `await` or `async for`"):
        next(iter(loader))
    with pytest.raises(ValueError, match="at least 1, not 0 and None"):
        StreamingDataLoader(LocalQueue(SPEC), GetRequest("train", 2), epochs=0)


def test_pytorchs_data_loader_takes_it_but_no_copy_of_the_queue() -> None:
    loader = StreamingDataLoader(asyncio.run(filled(a=range(5))), GetRequest("train", 2, partition="a"), epochs=2)
    batches = list(DataLoader(loader, batch_size=None, num_workers=0))
    assert rows(batches) == [[0, 1], [2, 3], [4]] * 2
    assert batches[0].torch("reward").tolist() == [0, 1]
    loader = StreamingDataLoader(asyncio.run(filled(a=range(5))), GetRequest("train", 2, partition="a"))
    with pytest.raises(RuntimeError, match="has a copy of it: workers share a queue that runs in a process of its own"):
        list(DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork"))


# -- over a queue in a process of its own


@pytest.fixture(scope="module")
def process() -> Iterator[QueueProcess]:
    with QueueProcess.start(SPEC) as process:
        yield process


def fill(queue: SyncQueue, name: str, ids: range) -> None:
    queue.create_partition(name, ids)
    queue.put(name, ids, local_queue.rewards(ids))


def await_handed_out(queue: SyncQueue, partition: str, count: int) -> None:
    """Ask until it is so: what another process does, or that it ended, is learnt in the meantime."""
    until = time.monotonic() + 60
    while queue.describe()["partitions"][partition]["tasks"]["train"]["handed_out"] != count:
        assert time.monotonic() < until, f"not {count} rows are out: {queue.describe()}"


def streamed(loader: StreamingDataLoader, workers: int) -> list[list[int]]:
    """What a DataLoader gives; of several workers, sorted, for who is first depends on timing."""
    given = rows(list(DataLoader(loader, batch_size=None, num_workers=workers, **forked(workers))))
    return sorted(given) if workers > 1 else given


def forked(workers: int) -> dict[str, object]:
    """in_order=False: a DataLoader that waits for one worker's turn asks the others for nothing, so they acknowledge
    nothing, and the first would wait for that: what they hold may come back."""
    return {"multiprocessing_context": "fork", "timeout": 120, "in_order": False} if workers else {}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_each_batch_once_and_the_next_partition_when_told(process: QueueProcess, workers: int) -> None:
    with process.sync() as queue:
        fill(queue, f"a{workers}", range(10))
        fill(queue, f"b{workers}", range(10, 14))
        loader = StreamingDataLoader(process.queue, GetRequest("train", 2, partition=f"a{workers}", timeout_s=60))
        assert streamed(loader, workers) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        loader.set_partition(f"b{workers}")
        assert streamed(loader, workers) == [[10, 11], [12, 13]]
        assert queue.clear_finished() == [f"a{workers}", f"b{workers}"], "all was acknowledged"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_replay_their_windows(process: QueueProcess, workers: int) -> None:
    with process.sync() as queue:
        fill(queue, f"c{workers}", range(12))
        get = GetRequest("train", 2, partition=f"c{workers}", timeout_s=60)
        loader = StreamingDataLoader(process.queue, get, epochs=3, window_rows=4)
        batches = [[row, row + 1] for row in range(0, 12, 2)]
        given = streamed(loader, workers)
        assert sorted(given) == sorted(batches * 3)
        if workers == 0:
            assert given == [*batches[:2] * 3, *batches[2:4] * 3, *batches[4:] * 3]
        assert queue.clear_finished() == [f"c{workers}"]


def test_a_reader_that_stops_gives_back_what_it_was_at(process: QueueProcess) -> None:
    with process.sync() as queue:
        fill(queue, "d", range(6))
        for batch in StreamingDataLoader(process.queue, GetRequest("train", 2, partition="d", timeout_s=60)):
            if batch.rows.tolist() == [2, 3]:
                break
        await_handed_out(queue, "d", 2)
        again = queue.get("train", 6, minimum=4, partition="d", timeout_s=60)
        assert again is not None and again.rows.tolist() == [2, 3, 4, 5]
        queue.acknowledge(again.lease)
        assert queue.clear_finished() == ["d"]


def test_the_rows_of_a_killed_worker_go_out_again(process: QueueProcess) -> None:
    with process.sync() as queue:
        fill(queue, "e", range(6))
        others = set(multiprocessing.active_children())
        get = GetRequest("train", 2, consumer="worker", partition="e", timeout_s=60)
        loader = StreamingDataLoader(process.queue, get)
        batches = iter(DataLoader(loader, batch_size=None, num_workers=1, prefetch_factor=1, **forked(1)))
        assert next(batches).rows.tolist() == [0, 1]
        await_handed_out(queue, "e", 4)  # the worker is at the second batch, and has acknowledged the first
        (worker,) = set(multiprocessing.active_children()) - others
        assert worker.pid is not None
        with pytest.raises(RuntimeError, match="killed by signal|exited unexpectedly"):
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            list(batches)
        del batches
        await_handed_out(queue, "e", 2)
        again = queue.get("train", 6, minimum=4, partition="e", timeout_s=60)
        assert again is not None and again.rows.tolist() == [2, 3, 4, 5]
        queue.acknowledge(again.lease)
        assert queue.clear_finished() == ["e"]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_partition_workers_end_when_the_queue_is_closed_and_empty(workers: int) -> None:
    with QueueProcess.start(SPEC) as process, process.sync() as queue:
        fill(queue, "a", range(4))
        fill(queue, "b", range(10, 14))
        queue.close()
        loader = StreamingDataLoader(process.queue, GetRequest("train", 2, timeout_s=60))
        assert streamed(loader, workers) == [[0, 1], [2, 3], [10, 11], [12, 13]]
