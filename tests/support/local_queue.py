"""A queue in the test's event loop, on virtual time, with rows that are quickly made and read."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from harness.runtime.virtual_runtime import run_virtual
from harness.transfer_queue import Batch, ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.rows.columns import Column
from harness.transfer_queue.storage.inline import LocalStorage

T = TypeVar("T")
RAGGED = {"tokens": ColumnSpec("int64", ragged=True), "old": ColumnSpec("float32", ragged=True)}
COLUMNS = RAGGED | {"reward": ColumnSpec("float32")}


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test on a clock that jumps to the next timer when nothing can run."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run


def queue(capacity_rows: int | None = None, storage: LocalStorage | None = None, **tasks: TaskSpec) -> LocalQueue:
    return LocalQueue(QueueSpec(COLUMNS, tasks or {"score": TaskSpec(("reward",))}, capacity_rows), storage)


async def filled(q: LocalQueue, rows: Sequence[int], name: str = "a", group_size: int = 1) -> LocalQueue:
    await q.create_partition(name, rows, group_size)
    await q.put(name, rows, rewards(rows))
    return q


def rewards(rows: Iterable[int]) -> dict[str, Column]:
    return {"reward": np.array(list(rows), np.float32)}


def ids(batch: Batch | None) -> list[int]:
    return batch.rows.tolist()


async def soon(awaitable: Awaitable[T]) -> asyncio.Task[T]:
    """Start it and let it run until it waits."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(5):
        await asyncio.sleep(0)
    assert isinstance(task, asyncio.Task)
    return task
