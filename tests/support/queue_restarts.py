"""Queues that end and are loaded again, behind `queue_machine.Side`."""

from __future__ import annotations

import tempfile

from harness.transfer_queue import LocalQueue, QueueSpec
from harness.transfer_queue.journal.service import JournaledService, save
from harness.transfer_queue.storage.inline import LocalStorage
from harness.transfer_queue.storage.protocol import Backend
from tests.support.queue_sides import LocalSide, ServerThread, SocketSide


class SavedSide(LocalSide):
    """It is saved, and loaded into another queue of this process."""

    def __init__(self, spec: QueueSpec) -> None:
        super().__init__(spec)
        self._folder = tempfile.TemporaryDirectory()

    def restart(self) -> bool:
        self.runner.run(self._restart())
        return True

    async def _restart(self) -> None:
        await self.queue.save(self._folder.name)
        self.queue = LocalQueue.load(self.queue.spec, self._folder.name)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


class JournaledSide(LocalSide):
    """Every change is in its folder: it is not saved before it ends."""

    def __init__(self, spec: QueueSpec) -> None:
        super().__init__(spec)
        self._folder = tempfile.TemporaryDirectory()
        self.runner.run(self._begin())

    def restart(self) -> bool:
        self._service.end()
        self.runner.run(self._begin())
        return True

    async def _begin(self) -> None:
        storage = LocalStorage()
        self.queue = LocalQueue(self.queue.spec, storage)
        self._service = JournaledService(self.queue.spec, storage, self._folder.name, storage=storage)
        self.queue._service = self._service

    def close(self) -> None:
        self._service.end()
        super().close()
        self._folder.cleanup()


class SavedSocketSide(SocketSide):
    """It is saved, and loaded by another server; all connections end with the first."""

    def __init__(self, spec: QueueSpec, backend: Backend, address: str | None = None) -> None:
        super().__init__(spec, backend, address)
        self._made_of = spec, backend, address

    def restart(self) -> bool:
        for connection in self.connections.values():
            connection.call("describe")  # what it said to have received has arrived
        with tempfile.TemporaryDirectory() as folder:
            self.server.run(save(self.server.server.service, folder))
            self.close()
            self.server = ServerThread(*self._made_of, resume=folder)
        return True
