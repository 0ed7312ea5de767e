"""The queue's process: one event loop, in which the control plane answers the connected clients."""

from __future__ import annotations

import asyncio
import errno
import resource
import secrets
import socket
from collections.abc import Mapping
from typing import Any, get_args

from harness.rpc.channel import server_channels
from harness.rpc.handshake import Role, new_token, token_for
from harness.rpc.sockets import (
    MESSAGE_LIMIT,
    Address,
    check_peer,
    forget_address,
    listen,
    new_address,
    send_at_once,
    takes_descriptors,
)
from harness.transfer_queue.control.spec import QueueSpec
from harness.transfer_queue.remote.connection import ServerConnection
from harness.transfer_queue.remote.messages import Cleared
from harness.transfer_queue.remote.room import Room
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.snapshots.snapshot import load
from harness.transfer_queue.storage.protocol import Backend, Session
from harness.transfer_queue.storage.shm import ShmStorage, ShmStore

_RETRY_S = 0.1  # between two tries to accept while this process may open no more files, or no more strangers are let in
_STRANGERS = 256  # connections that have proved nothing yet
_PATIENCE_S = 1.0  # that each of them has, where there are so many

_NO_CLIENT = 0  # clients are numbered from 1


class QueueServer:
    """Listens from `start` to `close`, in the event loop that runs.

    token: an admin's (`handshake.Role`), made up unless given; address: see `sockets`; limit: bytes of a message;
    resume: the folder of a saved queue that it goes on with; saves: the folder below which clients may have it saved,
    nowhere unless given.
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
        saves: str | None = None,
    ) -> None:
        self.spec = spec
        self.saves = saves
        self.backend = backend
        self.token = new_token() if token is None else token
        self.tokens: Mapping[Role, bytes] = {role: token_for(role, self.token) for role in get_args(Role)}
        self.address = new_address() if address is None else address
        self.limit = limit
        self.name = f"transfer-queue-{secrets.token_hex(8)}"
        self.store = backend.store(self.name)
        self.segments = self.store if isinstance(self.store, ShmStore) else None
        if self.segments is not None:
            self.segments.dropped = self._notify_writers
            if not takes_descriptors(self.address):
                raise ValueError(f"no descriptors travel over {self.address}: take InlineBackend, or a unix socket")
        self.service = self._start_service(resume)
        self.room = Room()
        self._listener: socket.socket | None = None
        self._connections: dict[int, ServerConnection] = {}
        self._strangers: dict[int, ServerConnection] = {}  # of them, in the order in which they came
        self._accepted = 0

    def _start_service(self, resume: str | None) -> QueueService:
        """In the event loop that runs. Payload that it brings is from then on the store's."""
        if resume is None:
            return QueueService(self.spec, self.store)
        storage = self.backend.storage(Session(self.name, _NO_CLIENT))
        try:
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
        self._listener, _ = listen(self.address)
        self._new_channel, self.address = server_channels(self._listener)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Every client learns it at once, by the end of its stream."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            forget_address(self.address)
        for connection in list(self._connections.values()):
            connection.close()
        self.store.close()

    async def __aenter__(self) -> QueueServer:
        self.start()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self.close()

    def end_clients_of(self, consumer: str, asked_by: ServerConnection) -> None:
        """As `Host` says: a process that was cut off, and is not dead, must not go on where it was."""
        for connection in list(self._connections.values()):
            if connection is not asked_by and connection.was_only(consumer):
                connection.close()

    def _accept(self) -> None:
        assert self._listener is not None
        if not self._has_room():
            return self._pause()
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                raise
            self._pause()
            return
        try:
            check_peer(sock)
        except PermissionError:
            return sock.close()
        sock.setblocking(False)
        send_at_once(sock)
        self._accepted += 1
        connection = ServerConnection(
            self, sock, self._new_channel(), self._accepted, admitted=self._strangers.pop, gone=self._forget
        )
        self._connections[self._accepted] = self._strangers[self._accepted] = connection
        connection.begin()

    def _has_room(self) -> bool:
        """For one more that has proved nothing: the oldest goes where it has had its time."""
        if len(self._strangers) < _STRANGERS:
            return True
        oldest = next(iter(self._strangers.values()))
        if asyncio.get_running_loop().time() - oldest.since < _PATIENCE_S:
            return False
        oldest.close()
        return True

    def _forget(self, writer: int) -> None:
        del self._connections[writer]
        self._strangers.pop(writer, None)

    def _pause(self) -> None:
        """Clients wait in the listener's backlog until another has gone, or proved itself."""
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
