"""A runtime whose connections to some processes go by way of a relay, which delays, tears or refuses them when told to:
harness/cli/relayed.py."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from harness.rpc.sockets import Address, client_socket, listen, new_address
from harness.runtime.local_runtime import LocalRuntime
from harness.runtime.runtime import Storage
from harness.transfer_queue import QueueSpec, TransferQueue
from harness.transfer_queue.remote.client import RemoteQueue

_CHUNK, _DESCRIPTORS = 256 << 10, 64
_POLL_S = 0.05
_SLOW_S = 0.5  # each chunk, at most
_SLOW_FOR_S = 10.0


class Told(msgspec.Struct, frozen=True):
    """An order to a relay, carried out once the file `go` is there. whom: `queue`, or how the names of workers
    begin."""

    what: str
    whom: str
    size: float
    go: str


class Relay:
    """A relay between one process that listens and its clients, also for descriptors that travel with their bytes."""

    def __init__(self, told: Told, there: Address) -> None:
        self._told, self._there = told, there
        self._listener, self.address = listen(new_address())
        self._listener.setblocking(True)
        self._slow_until = 0.0
        self._torn = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        for work in (self._accept, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._torn.is_set() and self._told.what == "refused":
                client.close()
                continue
            server, place = client_socket(self._there)
            with suppress(OSError):
                server.connect(place)
            self._pairs.append((client, server))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _watch(self) -> None:
        while not Path(self._told.go).exists():
            time.sleep(_POLL_S)
        if self._told.what == "delayed":
            self._slow_until = time.monotonic() + _SLOW_FOR_S
            return
        self._torn.set()  # the next chunk is torn
        if self._told.what == "refused":  # and whoever comes again
            for pair in self._pairs:
                _cut(*pair)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(source, _CHUNK, _DESCRIPTORS)
                if not data:
                    break
                if time.monotonic() < self._slow_until:
                    time.sleep(_SLOW_S * self._told.size)
                torn = self._torn.is_set()
                self._pass_on(target, data[: len(data) // 2] if torn else data, descriptors)
                if torn:
                    break
        _cut(source, target)

    def _pass_on(self, target: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
        try:
            sent = socket.send_fds(target, [data], list(descriptors)) if descriptors else 0
            target.sendall(data[sent:])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def relayed(told: Told) -> type[LocalRuntime]:
    """A runtime of this machine with relays before those whom it is about."""

    class RelayedRuntime(LocalRuntime):
        def start_queue(
            self, spec: QueueSpec, saves: Path | None = None, storage: Storage | None = None
        ) -> TransferQueue:
            queue = super().start_queue(spec, saves, storage)
            if told.whom != "queue":
                return queue
            assert isinstance(queue, RemoteQueue)
            address = Relay(told, queue.endpoint.address).address
            return RemoteQueue(replace(queue.endpoint, address=address))

        def reached_at(self, worker: str, address: Address) -> Address:
            return Relay(told, address).address if worker.startswith(told.whom) else address

    return RelayedRuntime
