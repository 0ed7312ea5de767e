"""The queue as every process may hold it: a TransferQueue over a socket."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from harness.transfer_queue.columns import Batch, Column
from harness.transfer_queue.control.asks import First
from harness.transfer_queue.queue import Portal
from harness.transfer_queue.remote import calls
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.link import Link
from harness.transfer_queue.spec import QueueSpec

_links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, bytes], asyncio.Task[Link]]] = (
    weakref.WeakKeyDictionary()
)
"""One connection for each event loop and queue: its address and token."""


@dataclass(frozen=True, slots=True)
class RemoteQueue:
    """A TransferQueue client; picklable, with its token.

    Connects with its first call, once for all in the same event loop, and never again there: after a failure every
    call raises ConnectionError. A call that the server does not answer in `where.call_timeout_s` raises TimeoutError.
    """

    where: calls.Whereabouts

    @property
    def spec(self) -> QueueSpec:
        return self.where.spec

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        await self._run(calls.create_partition(name, rows, group_size, timeout_s))

    async def put(
        self, partition: str, rows: Iterable[int], columns: Mapping[str, Column], *, timeout_s: float | None = None
    ) -> None:
        link = await self._link()
        await link.run(calls.put(link.storage, self.spec, partition, rows, columns, timeout_s))

    async def get(
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
        request = calls.get_request(task, count, consumer, rank, minimum, partition, first, timeout_s, False)
        link = await self._link()
        return await link.run(calls.get(link.storage, self.spec, request))

    async def set_bound(self, task: str, consumer: str, below: int) -> None:
        await self._run(calls.ask(m.SetBound(task, consumer, below)))

    async def drop(self, task: str, started: str, below: int) -> list[int]:
        return await self._run(calls.ask(m.Drop(task, started, below)))

    async def acknowledge(self, lease: int) -> None:
        await self._run(calls.ask(m.Acknowledge(lease)))

    async def give_back(self, lease: int) -> None:
        await self._run(calls.ask(m.GiveBack(lease)))

    async def release(self, consumer: str) -> None:
        await self._run(calls.ask(m.Release(consumer)))

    async def clear(self, partition: str) -> None:
        await self._run(calls.ask(m.Clear(partition)))

    async def clear_finished(self) -> list[str]:
        return await self._run(calls.ask(m.ClearFinished()))

    async def waiting(self) -> list[str]:
        return await self._run(calls.ask(m.Waiting()))

    async def save(self, folder: str | None = None) -> None:
        """The queue as it is now, in a folder of the server's machine, while it is in use; without one, in that in
        which it journals, whose journal becomes short again."""
        await self._run(calls.save(folder))

    async def close(self) -> None:
        await self._run(calls.ask(m.Close()))

    async def describe(self) -> Mapping[str, Any]:
        return await self._run(calls.ask(m.Describe()))

    @contextmanager
    def portal(self) -> Iterator[Portal[Any]]:
        with asyncio.Runner() as runner:
            yield runner.run

    async def disconnect(self) -> None:
        """End this event loop's connection, which ends with the loop anyway: what it has leased goes out again."""
        connecting = _links.get(asyncio.get_running_loop(), {}).pop(self._key, None)
        if connecting is not None:
            (await connecting).end("this client has disconnected")

    @property
    def _key(self) -> tuple[str, bytes]:
        return self.where.address, self.where.token

    async def _run(self, call: calls.Call) -> Any:
        return await (await self._link()).run(call)

    async def _link(self) -> Link:
        links = _links.setdefault(asyncio.get_running_loop(), {})
        connecting = links.get(self._key)
        if connecting is None or _is_inherited(connecting):
            connecting = links[self._key] = asyncio.ensure_future(Link.open(self.where))
        if connecting.done():
            return connecting.result()
        return await asyncio.shield(connecting)


def _is_inherited(connecting: asyncio.Task[Link]) -> bool:
    """Of a process that forked while its event loop ran."""
    return connecting.done() and connecting.exception() is None and connecting.result().inherited
