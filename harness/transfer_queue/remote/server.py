"""The queue's process: one event loop, in which the control plane answers the connected clients."""

import asyncio
import secrets
import socket
from typing import Any, Self, get_args

from harness.rpc.channel import Channel
from harness.rpc.handshake import Role, new_token, token_for
from harness.rpc.listener import Listener
from harness.rpc.sockets import (
    MESSAGE_LIMIT,
    Address,
    allow_many_files,
    forget_address,
    listen,
    new_address,
    takes_descriptors,
)
from harness.rpc.stream import Room
from harness.transfer_queue.control.spec import QueueSpec
from harness.transfer_queue.remote.messages import Cleared, Welcome
from harness.transfer_queue.remote.requests import Requests
from harness.transfer_queue.service.meetings import Meetings
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.snapshots.snapshot import load
from harness.transfer_queue.storage.protocol import QueueBackend, QueueSession
from harness.transfer_queue.storage.shm import ShmStorage, ShmStore

_NO_CLIENT = 0  # clients are numbered from 1


class QueueServer:
    """Listens from `start` to `close`, in the event loop that runs.

    token: an admin's (`handshake.Role`), made up unless given; address: see `sockets`; limit: bytes of a message;
    resume: the folder of a saved queue that it goes on with; saves: the folder below which clients may have it saved,
    nowhere unless given. segments: the store, where it is one of shared memory. Fifteen attributes, for requests need
    nine of them.
    """

    def __init__(
        self,
        spec: QueueSpec,
        backend: QueueBackend,
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
        self.room, self.meetings = Room(), Meetings()
        self._listener: Listener | None = None
        self._clients: dict[int, Requests] = {}
        self._admitted = 0

    def _start_service(self, resume: str | None) -> QueueService:
        """Start the service in the event loop that runs. Payload that it brings is from then on the store's."""
        now = asyncio.get_running_loop().time
        if resume is None:
            return QueueService(self.spec, self.store, now)
        storage = self.backend.storage(QueueSession(self.name, _NO_CLIENT))
        try:
            service = load(self.spec, self.store, resume, now, storage)
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
        sock, _ = listen(self.address)
        tokens = {role: token_for(role, self.token) for role in get_args(Role)}
        self._listener = Listener(sock, tokens, self._admit)
        self.address = self._listener.address
        self._listener.start()

    def close(self) -> None:
        """Every client learns it at once, by the end of its stream."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            forget_address(self.address)
        for client in list(self._clients.values()):
            client.stream.close()
        self.store.close()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self.close()

    def end_clients_of(self, consumer: str, asked_by: Requests) -> None:
        """End clients of this consumer, which is no more, and of no other, but not the one that says so: a process that
        was cut off, and is not dead, must not go on where it was."""
        for client in list(self._clients.values()):
            if client is not asked_by and client.was_only(consumer):
                client.stream.close()

    def _admit(self, sock: socket.socket, channel: Channel, role: Role) -> None:
        self._admitted += 1
        client = Requests(self, sock, channel, role, self._admitted, self._clients.pop)
        self._clients[self._admitted] = client
        client.send(0, Welcome(self.name, self._admitted))

    def _notify_writers(self, partition: str, writers: set[int]) -> None:
        for writer in writers & self._clients.keys():
            self._clients[writer].send(0, Cleared(partition))
