"""The queue for whoever has no event loop: the verbs of a TransferQueue, blocking."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.transfer_queue.columns import Batch, Column
from harness.transfer_queue.control.asks import First
from harness.transfer_queue.remote import calls
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.sync_link import SyncLink
from harness.transfer_queue.spec import QueueSpec


class SyncQueue:
    """For one thread at a time; no thread and no event loop of its own. What the calls promise stands in `queue.py`.

    Connects with its first call, in a forked child anew, and after a failure never again: every call then raises
    ConnectionError. Leaving its context disconnects: what it holds under a lease goes out again. Picklable.
    """

    def __init__(self, where: calls.Whereabouts) -> None:
        self.where = where
        self._link: SyncLink | None = None

    @property
    def spec(self) -> QueueSpec:
        return self.where.spec

    def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        self._run(calls.create_partition(name, rows, group_size, timeout_s))

    def put(
        self, partition: str, rows: Iterable[int], columns: Mapping[str, Column], *, timeout_s: float | None = None
    ) -> None:
        storage = self._connected().storage
        self._run(calls.put(storage, self.spec, partition, rows, columns, timeout_s))

    def get(
        self,
        task: str,
        count: int,
        *,
        consumer: str = "0",
        rank: int = 0,
        minimum: int | None = None,
        partition: str | None = None,
        first: First | None = None,
        timeout_s: float | None = None,
    ) -> Batch | None:
        request = calls.get_request(task, count, consumer, rank, minimum, partition, first, timeout_s, True)
        return self._run(calls.get(self._connected().storage, self.spec, request))

    def set_bound(self, task: str, consumer: str, below: int) -> None:
        self._run(calls.ask(m.SetBound(task, consumer, below)))

    def drop(self, task: str, started: str, below: int) -> list[int]:
        return self._run(calls.ask(m.Drop(task, started, below)))

    def acknowledge(self, lease: int) -> None:
        self._run(calls.ask(m.Acknowledge(lease)))

    def give_back(self, lease: int) -> None:
        self._run(calls.ask(m.GiveBack(lease)))

    def release(self, consumer: str) -> None:
        self._run(calls.ask(m.Release(consumer)))

    def clear(self, partition: str) -> None:
        self._run(calls.ask(m.Clear(partition)))

    def clear_finished(self) -> list[str]:
        return self._run(calls.ask(m.ClearFinished()))

    def waiting(self) -> list[str]:
        return self._run(calls.ask(m.Waiting()))

    def save(self, folder: str | None = None) -> None:
        """As `RemoteQueue.save`."""
        self._run(calls.save(folder))

    def close(self) -> None:
        self._run(calls.ask(m.Close()))

    def describe(self) -> Mapping[str, Any]:
        return self._run(calls.ask(m.Describe()))

    def disconnect(self) -> None:
        if self._link is not None:
            self._link.end("this client has disconnected")

    def __enter__(self) -> SyncQueue:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.disconnect()

    def __reduce__(self) -> tuple[Any, ...]:
        return SyncQueue, (self.where,)

    def _run(self, call: calls.Call) -> Any:
        return self._connected().run(call)

    def _connected(self) -> SyncLink:
        if self._link is None or self._link.inherited:
            self._link = SyncLink(self.where)
        return self._link
