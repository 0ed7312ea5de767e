"""The queue as its users see it: what roles, schedules and loaders program against.

`local.LocalQueue` lives in one event loop, `remote.client.RemoteQueue` reaches one in a process of its own.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from harness.transfer_queue.control.spec import GetRequest, QueueSpec, with_get_options
from harness.transfer_queue.rows.columns import Batch, Column

T = TypeVar("T")
Portal = Callable[[Coroutine[Any, Any, T]], T]


class TransferQueue(Protocol):
    """Rows (samples) x columns. A call that fails says why to its caller and leaves the queue as it was."""

    @property
    def spec(self) -> QueueSpec:
        """The queue's columns and tasks."""

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        """A named set of rows, served in this order, each `group_size` in turn a group. Waits, in order of the calls,
        while the queue is full: TimeoutError names the slowest task. ValueError for a name used before, doubled rows,
        broken groups, more rows than the queue may ever hold; QueueClosed after `close`."""

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        """Write some columns of some rows; they become ready together. ValueError, and nothing is written, for an
        unknown or cleared partition, a row that is not of it, an unknown column, another dtype, shape or row count than
        the schema's, or a cell written before."""

    async def get_batch(self, request: GetRequest) -> Batch | None:
        """Wait for `minimum` (default `count`) rows that are ready for the task, and take up to `count`, under a lease
        of the consumer, for `timeout_s` (default: for ever). All are of one partition: the named one, or the one that
        the task's policy asks first; at its end the rest, if fewer. None: the named partition (or the closed queue) is
        exhausted for this task. TimeoutError says what is missing; ValueError for an unknown task or rank, or a count
        that does not fit. Each rank of a task gets its own share of every micro-batch.

        first=(other, ((below, within), ...)): for each pair, what task `other` was handed under a bound (`set_bound`)
        of `below` or less, and this task was not handed yet, is to be among the next `within` rows that this task is
        handed, counted from this call. While others fit before it, at most as many go at once as do, even if fewer
        than `minimum`. Where none fits any more, or it is too late, what the lowest such `below` names is waited for
        and goes alone, and what is left of it in a partition is dispatched like that partition's rest. A named
        partition's rows only; what went back to the queue was not dispatched. ValueError for a task with several ranks.

        only=(row, ...): these, whole groups where the task wants such, whatever the policy says: all that are in the
        partition of the first one. It hands nobody a row that was dispatched. ValueError for a task with several ranks.
        """

    @with_get_options
    async def get(self, request: GetRequest) -> Batch | None:
        """`get_batch`, called with the fields of a request: `await queue.get("train", 4, minimum=1, rank=0)`."""
        return await self.get_batch(request)

    async def set_bound(self, task: str, consumer: str, below: int, above: int = 0) -> None:
        """Hand this consumer only rows with ids less than `below`, and of `above` or more, from now on."""

    async def drop(self, task: str, started: str, below: int) -> list[int]:
        """Take out of `task` all units it was not handed yet, ready or not, that task `started` was handed under a
        bound of `below` or less (of a group: a row). The ids of their rows; other tasks still get them. ValueError for
        a task with several ranks."""

    async def begin_again(self, partition: str, rows: Iterable[int]) -> None:
        """Forget all that was written of these rows, and who was handed them, as if the partition had just been
        created: they can be written, and are handed out, anew. Whoever holds some has to be done with them. ValueError
        for rows that are no whole groups, or have a column that a task is `settled_by`, or that were dropped, or
        handed to a task with leases or several ranks."""

    async def give_up(self, partition: str, rows: Iterable[int]) -> None:
        """Take whole groups out of every task that is not `settled_by` a column: it is handed none of them, and waits
        for nothing of them. Tasks that are go on with them until they are settled. ValueError for rows that are no
        whole groups, or that one of the former was handed."""

    async def finish(self, task: str, rows: Iterable[int]) -> None:
        """A task is done with these rows, of whatever partitions, ready or not, without being handed them: it read them
        before, and gave them back. ValueError, and nothing is changed in a partition, for a row that is in none, or
        that the task was handed, and for a task with several ranks."""

    async def acknowledge(self, lease: int) -> None:
        """The batch is done with. LeaseExpired if its rows went back to the queue; twice does no harm."""

    async def give_back(self, lease: int) -> None:
        """The batch was not worked on: its rows go out again, unless they did already."""

    async def reassign(self, task: str, rows: Iterable[int], consumer: str) -> None:
        """Let this consumer go on with what others were handed of these rows: where it dies, that goes out again."""

    async def release(self, consumer: str) -> None:
        """The consumer is dead: all it did not acknowledge goes out again, and its waiting gets fail."""

    async def clear(self, partition: str) -> None:
        """Free a partition. ValueError while a task with leases holds rows of it; a get of it then returns None."""

    async def clear_finished(self) -> list[str]:
        """Clear every partition that all tasks are done with, and that no reader still reads; their names. Rows dropped
        before they were ready are done with once all that their task reads was written: no put comes too late."""

    async def waiting(self) -> list[str]:
        """One line for each call that waits: who, for what, and what is missing."""

    async def close(self) -> None:
        """No more partitions. What is there can be written and read to its end."""

    async def describe(self) -> Mapping[str, Any]:
        """Depths, bytes and who waits, as plain numbers."""

    def portal(self) -> AbstractContextManager[Portal[Any]]:
        """Lends a function that runs this queue's coroutines from a thread without an event loop."""


@contextmanager
def portal_into(loop: asyncio.AbstractEventLoop | None) -> Iterator[Portal[Any]]:
    """A function for a thread without an event loop: it runs coroutines in this loop, or in one of its own while that
    one does not run."""
    if loop is None or not loop.is_running():  # the queue is in no other use: any loop will do
        with asyncio.Runner() as runner:
            yield runner.run
    else:
        yield partial(_run_in, loop)


def _run_in(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it in another thread's loop; an interrupt here takes it back there."""
    if asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError("this thread runs the queue's event loop and cannot wait for it: use `await` or `async for`")
    answer = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return answer.result()
    finally:
        answer.cancel()
