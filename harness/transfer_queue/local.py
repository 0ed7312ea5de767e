"""The queue inside one event loop: no other process, no serialisation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from harness.transfer_queue.control.leases import Lease
from harness.transfer_queue.control.spec import GetRequest, QueueSpec
from harness.transfer_queue.queue import Portal, TransferQueue, portal_into
from harness.transfer_queue.rows.columns import Batch, Column, as_integers
from harness.transfer_queue.service.service import QueueService, loop_time
from harness.transfer_queue.snapshots.snapshot import at_once, load, save
from harness.transfer_queue.storage.inline import LocalStorage

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def _as_coroutine(
    verb: Callable[Concatenate[QueueService, Arguments], Returned],
) -> Callable[Concatenate[LocalQueue, Arguments], Coroutine[Any, Any, Returned]]:
    """A verb of the service, which never waits, as the protocol has it."""

    @wraps(verb)
    async def call(self: LocalQueue, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        return verb(self._service, *args, **kwargs)

    return call


class LocalQueue(TransferQueue):
    """A TransferQueue in one event loop; other threads reach it through `portal`. It has no loop of its own.

    now: the clock of leases, in seconds; the event loop's unless given.
    """

    def __init__(
        self, spec: QueueSpec, storage: LocalStorage | None = None, now: Callable[[], float] = loop_time
    ) -> None:
        self._storage = LocalStorage() if storage is None else storage
        self._service = QueueService(spec, self._storage, now)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()

    @property
    def spec(self) -> QueueSpec:
        return self._service.spec

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        await self._service.create_partition(name, rows, group_size, timeout_s=timeout_s)

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        ids = as_integers(rows, "rows")
        weights = self.spec.check_columns(ids.size, columns)
        frame = self._storage.write(partition, columns)
        self._service.put(partition, ids, frame, weights)

    async def get_batch(self, request: GetRequest) -> Batch | None:
        self._loop = asyncio.get_running_loop()
        assignment = await self._service.get(request)
        if assignment is None:
            return None
        try:
            columns = self._storage.read(assignment, self.spec.columns)
        except BaseException:
            self._service.give_back(assignment.lease)
            raise
        self._service.received(assignment.lease)
        return Batch(assignment.partition, assignment.rows, columns, assignment.lease)

    set_bound = _as_coroutine(QueueService.set_bound)
    drop = _as_coroutine(QueueService.drop)
    begin_again = _as_coroutine(QueueService.begin_again)
    give_up = _as_coroutine(QueueService.give_up)
    finish = _as_coroutine(QueueService.finish)
    acknowledge = _as_coroutine(QueueService.acknowledge)
    give_back = _as_coroutine(QueueService.give_back)
    reassign = _as_coroutine(QueueService.reassign)
    release = _as_coroutine(QueueService.release)
    clear = _as_coroutine(QueueService.clear)
    clear_finished = _as_coroutine(QueueService.clear_finished)
    waiting = _as_coroutine(QueueService.waiting_now)
    close = _as_coroutine(QueueService.close)
    describe = _as_coroutine(QueueService.describe)

    def waiting_now(self) -> list[str]:
        """Lines as of `waiting`, at once, to report that nothing in this event loop can go on."""
        return self._service.waiting_now()

    async def save(self, folder: str | os.PathLike[str]) -> None:
        """The queue as it is now, in a folder; what was saved there before counts until all is on the disk."""
        await save(self._service, folder, at_once)

    @classmethod
    def load(cls, spec: QueueSpec, folder: str | os.PathLike[str], now: Callable[[], float] = loop_time) -> LocalQueue:
        """The queue as it was saved: see `snapshots.snapshot.load`. Gets that waited have to be made again."""
        queue = cls(spec, now=now)
        queue._service = load(spec, queue._storage, folder, now, queue._storage)
        return queue

    def open_leases(self) -> list[Lease]:
        """Leases that were dispatched and not acknowledged: after `load`, release the consumers that are no more."""
        return self._service.open_leases()

    def portal(self) -> AbstractContextManager[Portal[Any]]:
        """A portal, as the protocol says. RuntimeError in a forked process: it has a copy, which would hand out the
        same rows."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this queue lives in process {self._process}, and process {os.getpid()} has a copy of it: "
                "workers share a queue that runs in a process of its own (remote.process.QueueProcess)"
            )
        return portal_into(self._loop)
