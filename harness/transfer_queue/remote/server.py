"""The queue's process: one event loop, in which the control plane answers the connected clients."""

from __future__ import annotations

import asyncio
import errno
import resource
import secrets
import socket
from typing import Any

from harness.transfer_queue.control.spec import QueueSpec
from harness.transfer_queue.journal.service import JournaledService, load
from harness.transfer_queue.remote.connection import ServerConnection
from harness.transfer_queue.remote.messages import Cleared
from harness.transfer_queue.remote.sockets import (
    MESSAGE_LIMIT,
    Address,
    listen,
    new_address,
    new_token,
    send_at_once,
    takes_descriptors,
)
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.storage.protocol import Backend, Session
from harness.transfer_queue.storage.shm import ShmStorage, ShmStore

_RETRY_S = 0.1  # between two tries to accept while this process may open no more files

_NO_CLIENT = 0  # clients are numbered from 1


class QueueServer:
    """Listens from `start` to `close`, in the event loop that runs.

    token: what a client must have, made up unless given; address: see `sockets`; limit: bytes of a message; resume:
    the folder of a saved queue that it goes on with; journal: the folder of a queue that it goes on with, or of a new
    one, in which every change is written before it is answered.
    """

    def __init__(
        self,
        spec: QueueSpec,
        backend: Backend,
        *,
        token: bytes | None = None,
        address: Address | None = None,
        limit: int = MESSAGE_LIMIT,
        resume: str | None = None,
        journal: str | None = None,
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.token = new_token() if token is None else token
        self.address = new_address() if address is None else address
        self.limit = limit
        self.name = f"transfer-queue-{secrets.token_hex(8)}"
        self.store = backend.store(self.name)
        self.segments = self.store if isinstance(self.store, ShmStore) else None
        if self.segments is not None:
            self.segments.dropped = self._notify_writers
            if not takes_descriptors(self.address):
                raise ValueError(f"no descriptors travel over {self.address}: take InlineBackend, or a unix socket")
        self.service = self._start_service(resume, journal)
        self._listener: socket.socket | None = None
        self._connections: dict[int, ServerConnection] = {}
        self._accepted = 0

    def _start_service(self, resume: str | None, journal: str | None) -> QueueService:
        """In the event loop that runs. Payload that it brings is from then on the store's."""
        if resume is None and journal is None:
            return QueueService(self.spec, self.store)
        storage = self.backend.storage(Session(self.name, _NO_CLIENT))
        try:
            if journal is not None:
                service: QueueService = JournaledService(self.spec, self.store, journal, storage=storage)
            else:
                assert resume is not None
                service = load(self.spec, self.store, resume, storage=storage)
            if isinstance(storage, ShmStorage) and self.segments is not None:
                with service.moment() as (_, frames):
                    for partition in {partition for partition, _ in frames}:
                        if (segment := storage.unannounced(partition)) is not None:
                            self.segments.open(_NO_CLIENT, partition, segment.unit, segment.descriptor)
            return service
        finally:
            storage.close()

    def start(self) -> None:
        """OSError where the address cannot be listened on."""
        allow_many_files()
        self._listener, self.address = listen(self.address)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Every client learns it at once, by the end of its stream."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in list(self._connections.values()):
            connection.close()
        if isinstance(self.service, JournaledService):
            self.service.end()
        self.store.close()

    async def __aenter__(self) -> QueueServer:
        self.start()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                raise
            self._pause()
            return
        sock.setblocking(False)
        send_at_once(sock)
        self._accepted += 1
        self._connections[self._accepted] = ServerConnection(self, sock, self._accepted, self._connections.pop)

    def _pause(self) -> None:
        """Clients wait in the listener's backlog until another has gone."""
        loop, listener = asyncio.get_running_loop(), self._listener
        assert listener is not None
        loop.remove_reader(listener.fileno())
        loop.call_later(_RETRY_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def _notify_writers(self, partition: str, writers: set[int]) -> None:
        for writer in writers & self._connections.keys():
            self._connections[writer].send(0, Cleared(partition))


def allow_many_files() -> None:
    """As many as this process may have: each client and each segment is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
