"""Connections over TCP: who listens in learns nothing, who is in between can change nothing, and who shows another
certificate than that of the address is not spoken to."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from harness.rpc import listener
from harness.rpc.channel import Channel, channel_to, server_channels
from harness.rpc.handshake import ANSWER, STEP
from harness.rpc.sockets import Address, listen
from harness.transfer_queue import Ragged
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.server import QueueServer
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.storage.inline import InlineBackend
from tests.support.remote_queue import SPEC, Stranger, ids, serving, tokens, until

TCP = "tcp:127.0.0.1:0"
RECORD = 5  # bytes of a record's header: its kind, a version, and the length of what follows
HELLO = 22  # the kind of record that begins


def channels() -> tuple[Channel, Channel]:
    """A client's and a server's, open."""
    sock, _ = listen(TCP)
    with sock:
        new_channel, address = server_channels(sock)
    client, server = channel_to(address), new_channel()
    said = client.begin(b"")
    while not (client.is_open and server.is_open):
        said = client.begin(server.begin(said))
    return client, server


def test_what_was_changed_repeated_left_out_or_added_is_refused() -> None:
    said = (b"one", b"2" * 100_000, b"three")
    client, server = channels()
    records = [client.seal(one) for one in said]
    assert server.unseal(b"".join(records)) == b"".join(said) and client.seal(b"") == b""
    sizes = [len(record) for record in records]
    places = [*range(RECORD - 2), *range(RECORD, sizes[0])]  # but of its length: that waits for what never comes
    wrongs: list[Callable[[bytes, bytes, bytes], bytes]] = [
        *(lambda one, _, __, i=i: one[:i] + bytes([one[i] ^ 1]) + one[i + 1 :] for i in places),
        lambda one, _, __: one + one,
        lambda _, two, __: two,
        lambda one, _, three: one + three,
        lambda one, _, __: one + bytes([23, 3, 3, 0, 40]) + bytes(40),
    ]
    for wrong in wrongs:
        client, server = channels()
        first, second, third = (client.seal(one) for one in said)
        with pytest.raises(ConnectionError, match="not what the other side sent"):
            server.unseal(wrong(first, second, third))
    client, server = channels()
    with pytest.raises(ConnectionError, match="not what the other side sent"):
        client.unseal(client.seal(b"what one side said, said back to it"))


def test_an_address_of_tcp_without_a_certificate_is_not_connected_to() -> None:
    with pytest.raises(ValueError, match="'tcp:127.0.0.1:80' names no certificate"):
        channel_to("tcp:127.0.0.1:80")


class Between:
    """Keeps what it carries between clients and who listens. spoil: what becomes of the next bytes, to the server or
    not."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.address: Address = ""
        self.seen = {True: b"", False: b""}
        self.spoil: dict[bool, Callable[[bytes], bytes]] = {}
        self.ways: list[asyncio.Task[None]] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        for way in ((reader, back, True), (there, writer, False)):
            self.ways.append(asyncio.create_task(self._carry(*way)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, to_server: bool) -> None:
        with suppress(ConnectionError), closing(target):
            while data := await source.read(1 << 16):
                self.seen[to_server] += data
                target.write(self.spoil.pop(to_server, bytes)(data))


@asynccontextmanager
async def between(queue: RemoteQueue, there: Address) -> AsyncIterator[tuple[Between, RemoteQueue]]:
    """A relay to who listens there, and a client that takes it for the queue."""
    relay = Between(int(there.partition("#")[0].rpartition(":")[2]))
    async with await asyncio.start_server(relay.connected, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        digest = queue.endpoint.address.partition("#")[2]
        relayed = RemoteQueue(replace(queue.endpoint, address=f"tcp:127.0.0.1:{port}#{digest}"))
        yield relay, relayed
        relayed.end("the test is over")
        await asyncio.gather(*relay.ways)


async def test_who_listens_in_sees_neither_rows_nor_names_nor_the_token() -> None:
    secret = np.random.default_rng(0).integers(1 << 62, size=20_000)
    async with serving(InlineBackend(), TCP) as (server, queue), between(queue, server.address) as (relay, relayed):
        await relayed.create_partition("a name of its own", range(1))
        await relayed.put("a name of its own", range(1), {"tokens": Ragged.from_rows([secret])})
        batch = await relayed.get("score", 1)
        assert batch is not None and (batch.ragged("tokens").values == secret).all()
        for seen in relay.seen.values():
            assert len(seen) > secret.nbytes, "it came by"
            for hidden in (secret.tobytes()[:16], secret.tobytes()[-16:], b"a name of its own", server.token):
                assert hidden not in seen


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def with_a_record(data: bytes) -> bytes:
    return data + bytes([23, 3, 3, 0, 40]) + bytes(40)


@pytest.mark.parametrize("to_server", [True, False])
@pytest.mark.parametrize("spoil", [flipped, with_a_record])
async def test_what_is_changed_in_between_ends_the_connection(spoil: Callable[[bytes], bytes], to_server: bool) -> None:
    async with serving(InlineBackend(), TCP) as (server, queue), between(queue, server.address) as (relay, relayed):
        await relayed.create_partition("a", range(2))
        get = asyncio.create_task(relayed.get("score", 1))
        await until(queue, lambda waiting: len(waiting) == 1)
        relay.spoil[to_server] = spoil
        with pytest.raises(ConnectionError, match="is lost: " + ("" if to_server else "what came is not what the oth")):
            await relayed.waiting()
        with pytest.raises(ConnectionError, match="is lost"):
            await get
        await until(queue, lambda waiting: not waiting)
        await queue.put("a", range(2), tokens(range(2)))
        assert ids(await queue.get("score", 2)) == [0, 1]


async def test_who_shows_another_certificate_is_not_spoken_to() -> None:
    """Not even one that has the token."""
    async with serving(InlineBackend(), TCP) as (server, queue):
        async with QueueServer(SPEC, InlineBackend(), token=server.token, address=TCP) as other:
            async with between(queue, other.address) as (relay, relayed):
                with pytest.raises(PermissionError, match="another certificate than that of its address"):
                    await relayed.close()
                with pytest.raises(PermissionError, match="another certificate than that of its address"):
                    await asyncio.to_thread(SyncQueue(relayed.endpoint).close)
                said = relay.seen[True]
                assert said[0] == HELLO, "two of them, and nothing else"
                length = RECORD + int.from_bytes(said[RECORD - 2 : RECORD])
                assert said[length] == HELLO and len(said) == 2 * length
                assert (await RemoteQueue(replace(queue.endpoint, address=other.address)).waiting()) == []


@pytest.mark.parametrize("said", [bytes(ANSWER), b"\x16\x03\x01\xff\xff", b"GET / HTTP/1.1\r\n\r\n"])
async def test_who_speaks_no_tls_is_sent_away(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE_S", 0.2)  # for what may be the beginning of something
    async with serving(InlineBackend(), TCP) as (server, queue), Stranger.at(server, known=False) as stranger:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(stranger.sock, said)
        assert await loop.sock_recv(stranger.sock, 4096) == b""
        assert await queue.waiting() == [] and len(server._clients) == 1


@pytest.mark.parametrize(("address", "said"), [(None, STEP), (TCP, 0)])
async def test_silent_strangers_keep_none_out(address: str | None, said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_STRANGERS", 3)
    monkeypatch.setattr(listener, "_PATIENCE_S", 0.0)
    async with serving(InlineBackend(), address) as (server, queue), AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(Stranger.at(server, known=False)) for _ in range(9)]
        assert await queue.waiting() == []
        assert len(server._listener.strangers) <= 3 and len(server._clients) == 1  # type: ignore[union-attr]
        loop, heard = asyncio.get_running_loop(), b""
        while more := await loop.sock_recv(strangers[0].sock, 4096):
            heard += more
        assert len(heard) == said, "the oldest was sent away"


@pytest.mark.parametrize("address", [None, TCP])
async def test_a_client_without_the_token_is_refused_within_tls_too(address: str | None) -> None:
    async with serving(InlineBackend(), address) as (_, queue):
        stranger = replace(queue.endpoint, token=b"another")
        with pytest.raises(PermissionError, match="refuses a client without its token"):
            await RemoteQueue(stranger).describe()
        with pytest.raises(PermissionError, match="refuses a client without its token"):
            await asyncio.to_thread(SyncQueue(stranger).describe)


async def test_messages_of_tens_of_megabytes_arrive() -> None:
    rows = {"tokens": Ragged.from_rows([np.arange(4 << 20)])}
    async with serving(InlineBackend(), TCP) as (_, queue):

        def both_ways() -> int:
            with SyncQueue(queue.endpoint) as sync:
                sync.put("a", [1], rows)
                batch = sync.get("score", 1)
                return 0 if batch is None else int(batch.ragged("tokens").values.sum())

        await queue.create_partition("a", range(2))
        await queue.put("a", [0], rows)
        batch = await queue.get("score", 1)
        assert batch is not None and (batch.ragged("tokens").values == rows["tokens"].values).all()
        assert await asyncio.to_thread(both_ways) == int(rows["tokens"].values.sum())
