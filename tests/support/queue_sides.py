"""Every implementation of the queue behind one interface, `Side`: what `queue_machine` drives."""

import asyncio
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from harness.runtime.virtual_runtime import VirtualLoop
from harness.transfer_queue import QueueSpec
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.server import QueueServer
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.snapshots.snapshot import save
from harness.transfer_queue.storage.protocol import QueueBackend

START_S = 60.0
T = TypeVar("T")


class Side(Protocol):
    """A queue, and two connections to it."""

    spec: QueueSpec
    restarts: bool

    def call(self, consumer: str, verb: str, /, *arguments: Any, **options: Any) -> Any:
        """Call a verb of the TransferQueue protocol over this consumer's connection; return or raise what it does."""

    def describe(self) -> Mapping[str, Any]:
        """What the queue describes, as one."""

    def now(self) -> float:
        """By the clock of leases; stands still where no lease runs out."""

    def die(self, consumer: str) -> bool:
        """End its connection without a word; the next call makes another. Whether connections can die here."""

    def restart(self) -> None:
        """End the queue and load it into a new one, which `call` then speaks to."""

    def close(self) -> None: ...


class LocalSide:
    """Both consumers call the queue itself: there is no connection that could end. Its time is virtual."""

    restarts = False

    def __init__(self, spec: QueueSpec) -> None:
        self.spec = spec
        self.loop = VirtualLoop()
        self.queue = LocalQueue(spec)

    def call(self, consumer: str, verb: str, /, *arguments: Any, **options: Any) -> Any:
        return self.loop.run_until_complete(getattr(self.queue, verb)(*arguments, **options))

    def begin(self, verb: str, *arguments: Any) -> asyncio.Task[Any]:
        """A call that may wait."""
        return self.loop.create_task(getattr(self.queue, verb)(*arguments))

    def run_until_idle(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    def sleep(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def wait_for(self, task: asyncio.Task[T]) -> T:
        return self.loop.run_until_complete(task)

    def describe(self) -> Mapping[str, Any]:
        return self.call("x", "describe")

    def now(self) -> float:
        return self.loop.time()

    def die(self, consumer: str) -> bool:
        return False

    def restart(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.loop.close()


class SavedSide(LocalSide):
    """Its queue is saved and loaded."""

    restarts = True

    def restart(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.loop.run_until_complete(self.queue.save(folder))
            self.loop.run_until_complete(self._load(folder))

    async def _load(self, folder: str) -> None:
        self.queue = LocalQueue.load(self.spec, folder)


class ServerThread:
    """A queue's server in a thread of this process: as good as one of its own, and there at once."""

    def __init__(self, spec: QueueSpec, backend: QueueBackend, address: str | None = None, **options: Any) -> None:
        self._make = lambda: QueueServer(spec, backend, address=address, **options)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="transfer queue")
        self._thread.start()
        if not self._started.wait(START_S):
            raise TimeoutError(f"the transfer queue's thread did not start in {START_S} s")

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        try:
            self.server = self._make()
            async with self.server as server:
                self.endpoint = Endpoint(server.address, server.token, server.backend, server.spec)
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

    def __enter__(self) -> "ServerThread":
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


class SocketSide:
    """Consumer x has the asynchronous client, y the other. Nothing says goodbye: to disconnect is to die."""

    restarts = False

    def __init__(self, spec: QueueSpec, backend: QueueBackend, address: str | None = None) -> None:
        self.spec, self._backend, self._address = spec, backend, address
        self.server = ServerThread(spec, backend, address)
        self.connections: dict[str, AsyncConnection | SyncConnection] = {}

    def call(self, consumer: str, verb: str, /, *arguments: Any, **options: Any) -> Any:
        if consumer not in self.connections:
            kind = AsyncConnection if consumer == "x" else SyncConnection
            self.connections[consumer] = kind(self.server.endpoint)
        answer = self.connections[consumer].call(verb, *arguments, **options)
        if verb == "release" and arguments[0] != consumer:
            self.die(arguments[0])  # the queue has ended that connection; who asks again is another process
        return answer

    def describe(self) -> Mapping[str, Any]:
        return self.call("x", "describe")

    def now(self) -> float:
        return 0.0

    def die(self, consumer: str) -> bool:
        if consumer in self.connections:
            self.connections.pop(consumer).end()
        return True

    def restart(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """The server first, so that what its clients hold is not lost before it ends."""
        self.server.stop()
        for connection in self.connections.values():
            connection.end()
        self.connections.clear()


class SavedSocketSide(SocketSide):
    """It is saved, and loaded by another server; all connections end with the first."""

    restarts = True

    def restart(self) -> None:
        for connection in self.connections.values():
            connection.call("describe")  # what it said to have received has arrived
        with tempfile.TemporaryDirectory() as folder:
            self.server.run(save(self.server.server.service, folder))
            self.close()
            self.server = ServerThread(self.spec, self._backend, self._address, resume=folder)
