"""Clients of a queue over a socket that cancel, stop reading or go, and a server that goes: nothing is lost."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from harness.transfer_queue import GetRequest
from harness.transfer_queue.remote import connection
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.remote_queue import Stranger, descriptors, endpoint_of, ids, rewards, serving, tokens, until


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancelled_get_loses_no_row(turns: int) -> None:
    """Cancelled after so many turns of the event loop: while it is pending, answered, on its way, or here."""
    async with serving() as (_, queue):
        await queue.create_partition("a", range(2))
        await queue.put("a", [0], rewards([0]))
        get = asyncio.create_task(queue.get("score", 1))
        await until(queue, lambda waiting: len(waiting) == 1)
        put = asyncio.create_task(queue.put("a", range(2), tokens(range(2))))
        for _ in range(turns):
            await asyncio.sleep(0)
        get.cancel()
        await put
        taken = [] if (await asyncio.gather(get, return_exceptions=True))[0] is None else ids_or_none(get)
        while (batch := await queue.get("score", 1, partition="a")) is not None:
            taken += ids(batch)
        assert sorted(taken) == [0, 1]


def ids_or_none(get: asyncio.Task[object]) -> list[int]:
    return [] if get.cancelled() else ids(get.result())  # type: ignore[arg-type]


async def test_a_client_that_goes_gives_back_what_it_leased() -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(4))
        await queue.put("a", range(4), tokens(range(4)) | rewards(range(4)))

        def reader() -> None:
            with SyncQueue(endpoint_of(server)) as sync:
                first, second = sync.get("train", 1), sync.get("train", 1)
                assert first is not None and second is not None
                sync.acknowledge(first.lease)

        await asyncio.to_thread(reader)
        assert ids(await queue.get("train", 3)) == [1, 2, 3]


async def test_what_never_arrived_goes_out_again() -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(4))
        await queue.put("a", range(4), tokens(range(4)))
        async with Stranger.at(server) as stranger:
            get = m.Get(GetRequest("score", 2))
            assert isinstance(await stranger.asks(get), m.Assigned)
        assert ids(await queue.get("score", 4)) == [0, 1, 2, 3]


async def test_parked_gets_of_a_client_that_went_take_nothing() -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(4))
        async with Stranger.at(server) as stranger:
            await stranger.say(2, m.encode(m.Get(GetRequest("score", 2))))
            assert isinstance(await stranger.asks(m.Waiting()), m.Done)
        await until(queue, lambda waiting: not waiting)
        await queue.put("a", range(4), tokens(range(4)))
        assert ids(await queue.get("score", 4)) == [0, 1, 2, 3]


async def test_when_the_server_ends_every_client_is_told_at_once() -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(4))
        get = asyncio.create_task(queue.get("score", 1))
        await until(queue, lambda waiting: len(waiting) == 1)
        server.close()
        with pytest.raises(ConnectionError, match="its process has ended"):
            await get
        with pytest.raises(ConnectionError, match="its process has ended"):
            await queue.put("a", range(4), tokens(range(4)))


async def test_a_server_that_does_not_answer_is_named_with_what_was_asked() -> None:
    async with serving() as (server, _):
        endpoint = endpoint_of(server)
        queue = RemoteQueue(
            Endpoint(endpoint.address, endpoint.token, endpoint.backend, endpoint.spec, call_timeout_s=0.2)
        )
        await queue.waiting()
        server.service.clear = lambda partition: None  # type: ignore[method-assign]
        for one in server._connections.values():
            one._take = lambda frame: None
        with pytest.raises(TimeoutError, match=r"did not answer Clear\(partition='a'\) within 0.2 s"):
            await queue.clear("a")
        await queue.disconnect()


async def test_a_handout_that_no_message_takes_goes_back() -> None:
    async with serving(InlineBackend(), limit=100_000) as (_, queue):
        await queue.create_partition("a", range(40))
        for start in (0, 20):
            await queue.put("a", range(start, start + 20), tokens(range(start, start + 20)))
        for _ in range(2):
            with pytest.raises(ValueError, match="over the limit of 100000"):
                await queue.get("score", 40)
        assert ids(await queue.get("score", 20)) == list(range(20))


async def test_a_waiting_call_of_a_client_that_went_at_once_is_never_begun() -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(4))
        async with Stranger.at(server) as stranger:
            await stranger.say(2, m.encode(m.Get(GetRequest("score", 2))))
        await until(queue, lambda waiting: not waiting and len(server._connections) == 1)


async def test_a_client_that_reads_nothing_is_not_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_UNSENT", 1000)
    async with serving(InlineBackend()) as (server, queue), Stranger.at(server) as stranger:
        await queue.create_partition("a", range(400))
        await queue.put("a", range(400), tokens(range(400)))
        get = m.encode(m.Get(GetRequest("score", 200)))
        await stranger.say(2, get)
        await stranger.say(3, get)
        async with asyncio.timeout(60):  # the second get, of all that is left, is not even begun
            while (await queue.describe())["partitions"]["a"]["tasks"]["score"]["depth"] > 200:
                pass
        assert (await queue.describe())["partitions"]["a"]["tasks"]["score"]["depth"] == 200
        assert [call for call, _ in (await stranger.hear(), await stranger.hear())] == [2, 3]


async def test_a_client_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LOST", 1000)
    async with serving(InlineBackend()) as (server, queue), Stranger.at(server) as stranger:
        await queue.create_partition("a", range(400))
        await queue.put("a", range(400), tokens(range(400)))
        await stranger.say(2, m.encode(m.Get(GetRequest("score", 400))))
        await until(queue, lambda _: len(server._connections) == 1)
        monkeypatch.undo()
        assert ids(await queue.get("score", 400)) == list(range(400))


async def test_descriptors_go_with_the_partition_and_with_the_client() -> None:
    async with serving() as (_, queue):
        await queue.create_partition("first", range(1))
        await queue.put("first", range(1), tokens(range(1), 1000))
        await queue.clear("first")
        await queue.waiting()
        before = descriptors()
        for i in range(50):
            await queue.create_partition(str(i), range(4))
            await queue.put(str(i), range(4), tokens(range(4)))
            assert ids(await queue.get("score", 4)) == [0, 1, 2, 3]
        assert descriptors() == before + 100  # the writer's and the server's
        for i in range(50):
            await queue.clear(str(i))
        await queue.waiting()
        assert descriptors() == before


async def test_a_mapped_batch_survives_its_partition() -> None:
    async with serving(ShmBackend(0, 0)) as (_, queue):
        await queue.create_partition("a", range(4))
        before = descriptors()
        await queue.put("a", range(4), tokens(range(4), 100_000))
        batch = await queue.get("score", 4)
        await queue.clear("a")
        await queue.waiting()
        assert descriptors() == before  # a mapping holds none
        assert ids(batch) == [0, 1, 2, 3] and batch is not None
        batch.ragged("tokens").values[:] = 7


async def test_many_partitions_at_once() -> None:
    async with serving() as (_, queue):
        names = [f"p{i}" for i in range(100)]
        await asyncio.gather(*(queue.create_partition(name, range(3)) for name in names))
        gets = [asyncio.create_task(queue.get("score", 3, partition=name)) for name in names]
        await asyncio.gather(*(queue.put(name, [row], tokens([row])) for row in range(3) for name in names))
        assert [ids(await get) for get in gets] == [[0, 1, 2]] * 100
        await asyncio.gather(*(queue.clear(name) for name in names))


async def test_a_client_travels() -> None:
    async with serving() as (server, queue):
        other = pickle.loads(pickle.dumps(queue))
        await other.create_partition("a", range(4))
        assert list((await queue.describe())["partitions"]) == ["a"] and len(server._connections) == 1
        sync = pickle.loads(pickle.dumps(SyncQueue(queue.endpoint)))
        assert list((await asyncio.to_thread(sync.describe))["partitions"]) == ["a"]
        sync.disconnect()


async def test_a_portal_connects_on_its_own() -> None:
    async with serving() as (_, queue):

        def through() -> object:
            with queue.portal() as portal:
                portal(queue.create_partition("a", range(4)))
                return portal(queue.waiting())

        assert await asyncio.to_thread(through) == []
        assert list((await queue.describe())["partitions"]) == ["a"]
