"""The queue as its users see it: what roles, schedules and loaders program against.

`local.LocalQueue` lives in one event loop, `ray_backend.RayQueue` is reached from every process.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from harness.transfer_queue.columns import Batch, Column
from harness.transfer_queue.spec import QueueSpec

T = TypeVar("T")
Portal = Callable[[Coroutine[Any, Any, T]], T]


class TransferQueue(Protocol):
    """Rows (samples) x columns. A call that fails says why to its caller and leaves the queue as it was."""

    @property
    def spec(self) -> QueueSpec: ...

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        """A named set of rows, served in this order, each `group_size` in turn a group. Waits, in order of the calls,
        while the queue is full: TimeoutError names the slowest task. ValueError for a name used before, doubled rows,
        broken groups, more rows than the queue may ever hold; QueueClosed after `close`."""

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        """Write some columns of some rows; they become ready together. ValueError, and nothing is written, for an
        unknown or cleared partition, a row that is not of it, an unknown column, another dtype, shape or row count
        than the schema's, or a cell written before."""

    async def get(
        self,
        task: str,
        count: int,
        *,
        consumer: str = "0",
        rank: int = 0,
        minimum: int | None = None,
        partition: str | None = None,
        timeout_s: float | None = None,
    ) -> Batch | None:
        """Wait for `minimum` (default `count`) rows that are ready for the task, and take up to `count`, under a lease
        of the consumer. All are of one partition: the named one, or the oldest that has some; at its end the rest, if
        fewer. None: the named partition (or the closed queue) is exhausted for this task. TimeoutError says what is
        missing; ValueError for an unknown task or rank, or a count that does not fit."""

    async def set_bound(self, task: str, consumer: str, below: int) -> None:
        """From now on hand this consumer only rows with ids less than `below`."""

    async def acknowledge(self, lease: int) -> None:
        """The batch is done with. LeaseExpired if its rows went back to the queue; twice does no harm."""

    async def give_back(self, lease: int) -> None:
        """The batch was not worked on: its rows go out again, unless they did already."""

    async def release(self, consumer: str) -> None:
        """The consumer is dead: all it did not acknowledge goes out again, and its waiting gets fail."""

    async def clear(self, partition: str) -> None:
        """Free a partition. ValueError while a task with leases holds rows of it; a get of it then returns None."""

    async def close(self) -> None:
        """No more partitions. What is there can be written and read to its end."""

    async def describe(self) -> Mapping[str, Any]:
        """Depths, bytes and who waits, as plain numbers."""

    def portal(self) -> AbstractContextManager[Portal[Any]]:
        """Lends a function that runs this queue's coroutines from a thread without an event loop."""
