"""Queues behind `queue_machine.Side`: in this event loop, or behind sockets, with a client of either kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from harness.transfer_queue import LocalQueue, QueueSpec
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.server import QueueServer
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.storage.protocol import Backend

START_S = 60.0


class LocalSide:
    """Both consumers call the queue itself: there is no connection that could end."""

    def __init__(self, spec: QueueSpec) -> None:
        self.runner = asyncio.Runner()
        self.queue = LocalQueue(spec)

    def call(self, consumer: str, verb: str, /, *arguments: Any, **options: Any) -> Any:
        return self.runner.run(getattr(self.queue, verb)(*arguments, **options))

    def die(self, consumer: str) -> bool:
        return False

    def restart(self) -> bool:
        return False

    def close(self) -> None:
        self.runner.close()


class ServerThread:
    """A queue's server in a thread of this process: as good as one of its own, and there at once."""

    def __init__(
        self,
        spec: QueueSpec,
        backend: Backend,
        address: str | None = None,
        **options: Any,
    ) -> None:
        self._spec, self._backend, self._address, self._options = spec, backend, address, options
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="transfer queue")
        self._thread.start()
        if not self._started.wait(START_S):
            raise TimeoutError(f"the transfer queue's thread did not start in {START_S} s")

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        try:
            self.server = QueueServer(self._spec, self._backend, address=self._address, **self._options)
            async with self.server:
                self.endpoint = Endpoint(self.server.address, self.server.token, self._backend, self._spec)
                self._started.set()
                await self._over.wait()
        finally:
            self._started.set()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """In the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()


class AsyncConnection:
    """A RemoteQueue in an event loop of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._runner = asyncio.Runner()
        self._queue = RemoteQueue(endpoint)

    def call(self, verb: str, /, *arguments: Any, **options: Any) -> Any:
        return self._runner.run(getattr(self._queue, verb)(*arguments, **options))

    def end(self) -> None:
        self._runner.close()


class SyncConnection:
    def __init__(self, endpoint: Endpoint) -> None:
        self._queue = SyncQueue(endpoint)

    def call(self, verb: str, /, *arguments: Any, **options: Any) -> Any:
        return getattr(self._queue, verb)(*arguments, **options)

    def end(self) -> None:
        self._queue.disconnect()


KINDS = {"x": AsyncConnection, "y": SyncConnection}


class SocketSide:
    """Consumer x has the asynchronous client, y the other. Nothing says goodbye: to disconnect is to die."""

    def __init__(self, spec: QueueSpec, backend: Backend, address: str | None = None) -> None:
        self.server = ServerThread(spec, backend, address)
        self.connections: dict[str, AsyncConnection | SyncConnection] = {}

    def call(self, consumer: str, verb: str, /, *arguments: Any, **options: Any) -> Any:
        if consumer not in self.connections:
            self.connections[consumer] = KINDS[consumer](self.server.endpoint)
        return self.connections[consumer].call(verb, *arguments, **options)

    def die(self, consumer: str) -> bool:
        if consumer in self.connections:
            self.connections.pop(consumer).end()
        return True

    def restart(self) -> bool:
        return False

    def close(self) -> None:
        """The server first, so that what its clients hold is not lost before it ends."""
        self.server.stop()
        for connection in self.connections.values():
            connection.end()
        self.connections.clear()
