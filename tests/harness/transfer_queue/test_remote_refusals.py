"""Bad input to a queue over a socket: one clear error each, and the queue goes on."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.server import QueueServer
from harness.transfer_queue.remote.sockets import HEADER
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.remote_queue import SPEC, Stranger, descriptors, endpoint_of, rewards, serving, tokens, until


@pytest.mark.parametrize("token", [b"", b"wrong"])
async def test_a_client_without_the_token_is_refused(token: bytes) -> None:
    async with serving() as (server, queue):
        stranger = RemoteQueue(endpoint_of(server, token))
        for _ in range(2):
            with pytest.raises(PermissionError, match="refuses a client without its token"):
                await stranger.describe()
        with pytest.raises(PermissionError, match="refuses a client without its token"):
            await asyncio.to_thread(SyncQueue(endpoint_of(server, token)).describe)
        assert await queue.waiting() == []


async def test_whoever_does_not_prove_anything_is_refused_and_disconnected() -> None:
    async with serving() as (server, queue), Stranger.at(server, known=False) as stranger:
        await stranger.hear()
        answer = await stranger.asks(m.Describe())
        assert isinstance(answer, m.Failed) and answer.kind == "PermissionError"
        with pytest.raises(ConnectionError):
            await stranger.hear()
        assert await queue.waiting() == []


async def test_somebody_unknown_cannot_send_much() -> None:
    async with serving() as (server, _), Stranger.at(server, known=False) as stranger:
        await stranger.hear()
        answer = await stranger.asks(m.Proof(bytes(2000)))
        assert isinstance(answer, m.Failed) and "the limit is 1024" in answer.text


async def test_a_garbled_message_is_the_error_of_its_call() -> None:
    async with serving() as (server, queue), Stranger.at(server) as stranger:
        for garbled in (b"\xc1", m.encode(m.Done()), b""):
            await stranger.say(7, garbled)
            call, answer = await stranger.hear()
            assert call == 7 and isinstance(answer, m.Failed) and answer.kind == "ValueError", answer
        assert await stranger.asks(m.Waiting()) == m.Done([]) and await queue.waiting() == []


async def test_a_truncated_frame_leaves_nothing() -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(2))
        async with Stranger.at(server) as stranger:
            put = m.encode(m.Put("a", np.arange(2).tobytes(), (2, {"reward": 8}, bytes(8)), {}, None))
            await asyncio.get_running_loop().sock_sendall(stranger.sock, HEADER.pack(len(put), 0, 2) + put[:-1])
        await queue.put("a", range(2), rewards(range(2)))
        assert (await queue.describe())["partitions"]["a"]["written"]["reward"] == 2


async def test_an_oversized_message_ends_its_connection_only() -> None:
    async with serving(limit=1000) as (server, queue), Stranger.at(server) as stranger:
        await stranger.say(2, bytes(1001))
        answer = (await stranger.hear())[1]
        assert isinstance(answer, m.Failed) and "1001 bytes was announced; the limit is 1000" in answer.text
        with pytest.raises(ConnectionError):
            await stranger.hear()
        assert await queue.waiting() == []


async def test_an_oversized_put_is_refused_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.transfer_queue.remote.sockets.header.__defaults__", ((), 10_000))
    async with serving(InlineBackend()) as (_, queue):
        await queue.create_partition("a", range(4))
        with pytest.raises(ValueError, match="over the limit of 10000: put fewer rows at a time"):
            await queue.put("a", range(4), tokens(range(4)))
        await queue.put("a", [0], tokens([0]))


async def test_columns_that_do_not_fit_the_schema_are_refused() -> None:
    async with serving() as (_, queue):
        await queue.create_partition("a", range(4))
        with pytest.raises(ValueError, match="column 'x' is unknown"):
            await queue.put("a", range(4), {"x": np.zeros(4)})
        with pytest.raises(ValueError, match="holds float32, not float64"):
            await queue.put("a", range(4), {"reward": np.zeros(4)})
        with pytest.raises(ValueError, match="partition 'b' is unknown"):
            await queue.put("b", range(4), tokens(range(4)))
        with pytest.raises(ValueError, match="partition 'b' is unknown"):
            await queue.put("b", range(4), rewards(range(4)))
        await queue.put("a", range(4), tokens(range(4)))
        with pytest.raises(ValueError, match="is already written"):
            await queue.put("a", range(4), tokens(range(4)))
        await queue.clear("a")
        with pytest.raises(ValueError, match="partition 'a' was cleared"):
            await queue.put("a", range(4), rewards(range(4)))


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        ((2, {"x": 8}, bytes(8)), "column 'x' is unknown"),
        ((2, {"reward": 12}, bytes(12)), "12 bytes cannot hold 2 rows"),
        ((2, {"reward": 8}, bytes(9)), "a frame of 8 bytes came with 9"),
        ((3, {"reward": 12}, bytes(12)), "a frame of 3 rows came for 2 row ids"),
        ((2, {"reward": 8}, (1 << 32, 0)), "has no segment"),
    ],
)
async def test_a_frame_is_not_believed(frame: m.WireFrame, error: str) -> None:
    async with serving() as (server, queue), Stranger.at(server) as stranger:
        await queue.create_partition("a", range(2))
        await queue.put("a", range(2), tokens(range(2)))  # into a segment of another's
        answer = await stranger.asks(m.Put("a", np.arange(2).tobytes(), frame, {}, None))
        assert isinstance(answer, m.Failed) and answer.kind == "ValueError" and error in answer.text
        assert (await queue.describe())["partitions"]["a"]["written"]["reward"] == 0


async def test_a_segment_that_could_shrink_is_refused_and_closed() -> None:
    async with serving() as (server, queue), Stranger.at(server) as stranger:
        await queue.create_partition("a", range(2))
        before = descriptors()
        unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        answer = await stranger.asks(m.OpenSegment("a", stranger.writer << 32), [unsealed])
        os.close(unsealed)
        assert isinstance(answer, m.Failed) and "not sealed against shrinking" in answer.text
        await until(queue, lambda _: descriptors() == before)


async def test_shared_memory_does_not_go_over_tcp() -> None:
    with pytest.raises(ValueError, match="no descriptors travel over tcp:127.0.0.1:0"):
        QueueServer(SPEC, ShmBackend(), address="tcp:127.0.0.1:0")


async def test_nobody_listening_is_a_clear_error() -> None:
    queue = RemoteQueue(Endpoint("unix:nobody-is-here", b"", ShmBackend(), SPEC))
    with pytest.raises(ConnectionError, match="no transfer queue listens on unix:nobody-is-here"):
        await queue.describe()
    with pytest.raises(ConnectionError, match="no transfer queue listens on unix:nobody-is-here"):
        SyncQueue(queue.endpoint).describe()
