"""The queue over a socket, with the server in the event loop of the test: what is promised."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from harness.transfer_queue import LeaseExpired, QueueClosed, QueueSpec, TaskSpec
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.protocol import Backend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.remote_queue import COLUMNS, Stranger, endpoint_of, ids, rewards, serving, tokens, until

BACKENDS = pytest.mark.parametrize(
    ("backend", "address"),
    [(ShmBackend(), None), (ShmBackend(0, 0), None), (InlineBackend(), None), (InlineBackend(), "tcp:127.0.0.1:0")],
    ids=["shm", "shm without copies", "inline", "tcp"],
)


@BACKENDS
async def test_what_one_writes_another_reads(backend: Backend, address: str | None) -> None:
    async with serving(backend, address) as (_, queue):
        await queue.create_partition("a", range(64))
        await queue.put("a", range(0, 64, 2), tokens(range(0, 64, 2)))
        await queue.put("a", range(1, 64, 2), tokens(range(1, 64, 2)))
        assert ids(await queue.get("score", 40)) == list(range(40))
        await queue.put("a", [5, 3], rewards([5, 3]))
        batch = await queue.get("train", 2)
        assert ids(batch) == [3, 5] and batch is not None and batch.dense("reward").tolist() == [3, 5]
        batch.ragged("tokens").values[:] = 0
        await queue.acknowledge(batch.lease)
        assert ids(await queue.get("score", 24)) == list(range(40, 64))
        assert await queue.get("score", 1, partition="a") is None


@BACKENDS
async def test_a_blocking_client_does_the_same(backend: Backend, address: str | None) -> None:
    async with serving(backend, address) as (server, queue):

        def blocking() -> None:
            with SyncQueue(endpoint_of(server)) as sync:
                sync.create_partition("a", range(8))
                sync.put("a", range(8), tokens(range(8)))
                assert ids(sync.get("score", 8)) == list(range(8))
                with pytest.raises(TimeoutError, match="rows that lack a column: {'reward': 8}"):
                    sync.get("train", 8, timeout_s=0.01)
                assert sync.describe()["open_leases"] == 1
                sync.clear("a")

        await asyncio.to_thread(blocking)
        assert (await queue.describe())["partitions"] == {}


async def test_every_verb_reaches_the_control_plane() -> None:
    async with serving() as (_, queue):
        await queue.create_partition("a", range(8))
        await queue.put("a", range(8), tokens(range(8)) | rewards(range(8)))
        await queue.set_bound("score", "x", 3)
        assert ids(await queue.get("score", 8, minimum=1, consumer="x")) == [0, 1, 2]
        assert await queue.drop("train", "score", 3) == [0, 1, 2]
        batch = await queue.get("train", 2, consumer="y")
        assert ids(batch) == [3, 4] and batch is not None
        await queue.give_back(batch.lease)
        assert ids(await queue.get("train", 2, consumer="y")) == [3, 4]
        await queue.release("y")
        assert ids(await queue.get("train", 5, first=("score", ((3, 2),)))) == [3, 4, 5, 6, 7]
        with pytest.raises(ValueError, match="cannot be cleared: consumer '0' of task 'train'"):
            await queue.clear("a")
        with pytest.raises(LeaseExpired):
            await queue.acknowledge(2)
        assert await queue.clear_finished() == [] and await queue.waiting() == []
        await queue.close()
        with pytest.raises(QueueClosed):
            await queue.create_partition("b", [1])


async def test_a_parked_get_is_answered_by_a_put_and_holds_nobody_up() -> None:
    async with serving() as (_, queue):
        await queue.create_partition("a", range(4))
        gets = [asyncio.create_task(queue.get("score", 1, consumer=str(i))) for i in range(4)]
        await until(queue, lambda waiting: len(waiting) == 4)
        await queue.put("a", range(4), tokens(range(4)))
        assert sorted([row for batch in await asyncio.gather(*gets) for row in ids(batch)]) == [0, 1, 2, 3]


async def test_a_put_beyond_the_bytes_waits_for_room() -> None:
    spec = QueueSpec(COLUMNS, {"score": TaskSpec(("tokens",))}, capacity_bytes=10_000)
    async with serving(spec=spec) as (_, queue):
        await queue.create_partition("a", range(2))
        await queue.create_partition("b", range(2))
        await queue.put("a", range(2), tokens(range(2)))
        with pytest.raises(TimeoutError, match="no room for a put"):
            await queue.put("b", range(2), tokens(range(2)), timeout_s=0.01)
        waiting = asyncio.create_task(queue.put("b", range(2), tokens(range(2))))
        assert ids(await queue.get("score", 2, partition="a")) == [0, 1]
        await waiting
        assert ids(await queue.get("score", 2, partition="b")) == [0, 1]


async def test_of_a_large_put_in_messages_only_what_is_asked_for_travels() -> None:
    async with serving(InlineBackend(), limit=3_000_000) as (_, queue):
        await queue.create_partition("a", range(512))
        for start in (0, 256):
            rows = range(start, start + 256)
            await queue.put("a", rows, tokens(rows, 1000) | rewards(rows))
        for start in range(0, 512, 32):
            batch = await queue.get("train", 32)
            assert ids(batch) == list(range(start, start + 32)) and batch is not None
            assert batch.dense("reward").tolist() == list(range(start, start + 32))


async def test_requests_of_one_client_are_begun_in_their_order() -> None:
    async with serving() as (server, _), Stranger.at(server) as stranger:
        rows = np.arange(2).tobytes()
        frame = (2, {"reward": 8}, bytes(8))
        for call, request in enumerate((m.CreatePartition("a", rows, 1, None), m.Put("a", rows, frame, {}, None)), 2):
            await stranger.say(call, m.encode(request))
        assert [await stranger.hear() for _ in range(2)] == [(2, m.Done()), (3, m.Done())]


def test_scalars_of_numpy_travel_as_numbers() -> None:
    assert m.decode_answer(m.encode(m.Done([np.int64(3), np.float32(0.5)]))) == m.Done([3, 0.5])
