"""The queue's process: one event loop, in which the control plane answers whoever is connected."""

from __future__ import annotations

import asyncio
import errno
import resource
import secrets
import socket
from typing import Any

from harness.transfer_queue.journal.service import JournaledService
from harness.transfer_queue.remote import address as addresses
from harness.transfer_queue.remote import auth, restart
from harness.transfer_queue.remote.connection import Connection
from harness.transfer_queue.remote.framing import MESSAGE_LIMIT
from harness.transfer_queue.remote.messages import Cleared
from harness.transfer_queue.spec import QueueSpec
from harness.transfer_queue.storage.protocol import Backend
from harness.transfer_queue.storage.shm_keeper import ShmKeeper

_BREATH_S = 0.1  # between two tries to accept while this process may open no more files


class QueueServer:
    """Listens from `start` to `close`, in the event loop that runs.

    token: what a client must have, made up unless given; address: see `address`; limit: bytes of a message; start: the
    queue that it goes on with, a new one unless given; see `restart`.
    """

    def __init__(
        self,
        spec: QueueSpec,
        backend: Backend,
        *,
        token: bytes | None = None,
        address: addresses.Address | None = None,
        limit: int = MESSAGE_LIMIT,
        start: restart.Start = restart.new,
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.token = auth.new_token() if token is None else token
        self.address = addresses.new_address() if address is None else address
        self.limit = limit
        self.name = f"transfer-queue-{secrets.token_hex(8)}"
        self.keeper = backend.keeper(self.name)
        self.segments = self.keeper if isinstance(self.keeper, ShmKeeper) else None
        if self.segments is not None:
            self.segments.dropped = self._tell_writers
            if not addresses.takes_descriptors(self.address):
                raise ValueError(f"no descriptors travel over {self.address}: take InlineBackend, or a unix socket")
        self.service = restart.start_service(start, spec, backend, self.keeper, self.name)
        self._listener: socket.socket | None = None
        self._connections: dict[int, Connection] = {}
        self._accepted = 0

    def start(self) -> None:
        """OSError where the address cannot be listened on."""
        allow_many_files()
        self._listener, self.address = addresses.listen(self.address)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Every client is told at once, by the end of its stream."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in list(self._connections.values()):
            connection.close()
        if isinstance(self.service, JournaledService):
            self.service.end()
        self.keeper.close()

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
        addresses.send_at_once(sock)
        self._accepted += 1
        self._connections[self._accepted] = Connection(self, sock, self._accepted, self._connections.pop)

    def _pause(self) -> None:
        """Clients wait in the listener's backlog until another has gone."""
        loop, listener = asyncio.get_running_loop(), self._listener
        assert listener is not None
        loop.remove_reader(listener.fileno())
        loop.call_later(_BREATH_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def _tell_writers(self, partition: str, writers: set[int]) -> None:
        for writer in writers & self._connections.keys():
            self._connections[writer].send(0, Cleared(partition))


def allow_many_files() -> None:
    """As many as this process may have: each client and each segment is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
