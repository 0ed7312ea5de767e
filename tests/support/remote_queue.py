"""A queue server in the test's own event loop, its clients, and a stranger who says what he likes."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.rpc.channel import Channel, Plain
from harness.rpc.handshake import greet
from harness.rpc.sockets import HEADER, Splitter, receive, socket_address
from harness.transfer_queue import Batch, Column, ColumnSpec, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.server import QueueServer
from harness.transfer_queue.storage.protocol import QueueBackend
from harness.transfer_queue.storage.shm import ShmBackend

COLUMNS = {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float32")}
TRAIN = TaskSpec(("tokens", "reward"), "ready", lease_s=float("inf"))
SPEC = QueueSpec(COLUMNS, {"score": TaskSpec(("tokens",)), "train": TRAIN})


@asynccontextmanager
async def serving(
    backend: QueueBackend | None = None, address: str | None = None, spec: QueueSpec = SPEC, **options: Any
) -> AsyncIterator[tuple[QueueServer, RemoteQueue]]:
    backend = ShmBackend() if backend is None else backend
    async with QueueServer(spec, backend, address=address, **options) as server:
        queue = RemoteQueue(endpoint_of(server))
        yield server, queue
        await queue.disconnect()


def endpoint_of(server: QueueServer, token: bytes | None = None) -> Endpoint:
    return Endpoint(server.address, server.token if token is None else token, server.backend, server.spec)


def tokens(rows: Iterable[int], length: int = 500) -> dict[str, Column]:
    """So long that they do not go in a message."""
    return {"tokens": Ragged.from_rows([np.full(length + row % 7, row) for row in rows], np.int64)}


def rewards(rows: Iterable[int]) -> dict[str, Column]:
    return {"reward": np.array(list(rows), np.float32)}


def ids(batch: Batch | None) -> list[int]:
    """The rows of a batch, whose tokens are those that `tokens` made for them."""
    for row, described in zip(batch.rows, batch.ragged("tokens").rows(), strict=True):
        assert described.size and (described == row).all()
    return batch.rows.tolist()


@dataclass
class Stranger:
    """A client that follows no rules."""

    server: QueueServer
    sock: socket.socket
    writer: int = 0
    channel: Channel = field(default_factory=Plain)
    splitter: Splitter = field(default_factory=Splitter)
    heard: list[tuple[int, m.AnyResponse]] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def at(cls, server: QueueServer, known: bool = True) -> AsyncIterator["Stranger"]:
        """known: admitted already."""
        family, place = socket_address(server.address)
        with socket.socket(family) as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, place)
            stranger = cls(server, sock)
            if known:
                stranger.channel = await greet(sock, server.token, "the transfer queue", server.address)
                _, welcome = await stranger.hear()
                assert isinstance(welcome, m.Welcome)
                stranger.writer = welcome.writer
            yield stranger

    async def say(self, call: int, body: bytes, descriptors: Sequence[int] = ()) -> None:
        data = HEADER.pack(len(body), len(descriptors), call) + body
        if descriptors:
            socket.send_fds(self.sock, [data], list(descriptors))
        else:
            await asyncio.get_running_loop().sock_sendall(self.sock, self.channel.seal(data))

    async def hear(self) -> tuple[int, m.AnyResponse]:
        """(call, answer); ConnectionError at the end of the stream."""
        while not self.heard:
            data, descriptors = await self._readable()
            if not data:
                raise ConnectionError("the server has hung up")
            for frame in self.splitter.feed(self.channel.unseal(data), descriptors):
                self.heard.append((frame.call, m.decode_answer(frame.body)))
                for descriptor in frame.descriptors:
                    os.close(descriptor)
        return self.heard.pop(0)

    async def asks(self, message: m.Message, descriptors: Sequence[int] = ()) -> m.AnyResponse:
        await self.say(2, m.encode(message), descriptors)
        return (await self.hear())[1]

    async def _readable(self) -> tuple[bytes, list[int]]:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.sock.fileno(), ready.set)
        try:
            await asyncio.wait_for(ready.wait(), 60)
        finally:
            loop.remove_reader(self.sock.fileno())
        return receive(self.sock)


async def until(queue: RemoteQueue, true: Callable[[list[str]], bool]) -> None:
    """Ask the queue who waits, until that is so."""
    async with asyncio.timeout(60):
        while not true(await queue.waiting()):
            pass


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
