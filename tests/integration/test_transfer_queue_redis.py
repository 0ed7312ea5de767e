"""Payloads in real redis servers, started here: two, on unix sockets, with a password, keeping nothing on disk."""

import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.transfer_queue.control.spec import QueueSpec, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.rows.frames import assemble
from harness.transfer_queue.storage.protocol import QueueSession
from tests.support.forked_drivers import Drivers
from tests.support.queue_machine import TASKS, UNTIMED, run_machine
from tests.support.queue_sides import SocketSide
from tests.support.real_runs import SMALL
from tests.support.redis_servers import Server, keys, redis_server
from tests.support.storages import SPECS, assert_read, assignment, columns

redis = pytest.importorskip("redis", reason="needs the redis extra")
from harness.transfer_queue.storage.redis_storage import SERVERS, RedisBackend  # noqa: E402

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server on the PATH"),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    with redis_server() as one, redis_server() as other:
        yield one, other


@pytest.fixture
def backend(servers: tuple[Server, Server]) -> RedisBackend:
    return RedisBackend(tuple(server.url for server in servers), inline_bytes=0)


def test_a_partition_spreads_over_servers_for_another(backend: RedisBackend, servers: tuple[Server, Server]) -> None:
    writer, reader = backend.storage(QueueSession("queue", 1)), backend.storage(QueueSession("queue", 2))
    first, second = writer.write("train_0", columns(range(8))), writer.write("train_0", columns(range(8, 12)))
    assert {first.place[0], second.place[0]} == {0, 1}  # type: ignore[index]
    assert_read(reader.read(assignment((first, 2, 5), (second, 0, 4)), SPECS), [2, 3, 4, 8, 9, 10, 11])
    assert_read(reader.read(assignment((first, 0, 8)), SPECS), list(range(8)))
    for server in servers:
        with server.client() as client:
            assert client.keys("*") == [b"queue:train_0"]
            assert 86_000 < client.ttl("queue:train_0") <= 86_400
    assert reader.read(assignment(), SPECS)["reward"].size == 0  # type: ignore[union-attr]
    store = backend.store("queue")
    store.drop("train_0")
    store.close()
    writer.close()
    reader.close()
    assert keys(servers) == []


@pytest.mark.slow
def test_a_run_keeps_its_rows_in_the_servers_and_leaves_none_there(
    servers: tuple[Server, Server], results: Path, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVERS, servers[0].url)
    with servers[0].client() as client:
        client.config_resetstat()
        folder = drivers.bench(results, "redis", "cluster.queue=redis", *SMALL.split(), "iterations=2")
        assert client.info("commandstats")["cmdstat_hset"]["calls"] > 0
    assert (folder / "DONE").is_file() and keys(servers) == []


def test_a_reader_asks_for_its_columns_only_in_one_round_trip_a_server(servers: tuple[Server, Server]) -> None:
    backend = RedisBackend((servers[0].url,), inline_bytes=0)
    storage = backend.storage(QueueSession("queue", 1))
    frames = [storage.write("train_0", columns(range(4))) for _ in range(3)]
    with servers[0].client() as client:
        client.config_resetstat()
        got = storage.read(assignment(*((frame, 0, 4) for frame in frames), names=("reward",)), SPECS)
        assert list(got) == ["reward"]
        described = client.info("commandstats")
        assert described["cmdstat_hmget"]["calls"] == described["cmdstat_expire"]["calls"] == 1
        assert "cmdstat_hget" not in described and "cmdstat_hgetall" not in described
    store = backend.store("queue")
    store.close()  # also frees what was never dropped
    storage.close()
    assert keys(servers) == []


def test_a_small_frame_travels_in_its_message(backend: RedisBackend, servers: tuple[Server, Server]) -> None:
    storage = replace(backend, inline_bytes=4096).storage(QueueSession("queue", 1))
    frame = storage.write("train_0", columns(range(4)))
    assert isinstance(frame.place, bytes)
    assert keys(servers) == []
    assert_read(storage.read(assignment((frame, 1, 3)), SPECS), [1, 2])
    storage.discard("train_0", frame)
    storage.close()


def test_what_the_queue_refused_is_gone(backend: RedisBackend, servers: tuple[Server, Server]) -> None:
    storage = backend.storage(QueueSession("queue", 1))
    storage.discard("train_0", storage.write("train_0", columns(range(4))))
    assert keys(servers) == []
    storage.close()


def test_a_drop_takes_what_a_dead_writer_left_and_nothing_of_other_partitions_or_queues(
    backend: RedisBackend, servers: tuple[Server, Server]
) -> None:
    writer, other = backend.storage(QueueSession("queue", 1)), backend.storage(QueueSession("queue*", 1))
    for partition in ("train_0", "train_0", "train_1", "train_1"):
        writer.write(partition, columns(range(4)))  # it was not announced
    other.write("train_0", columns(range(4)))
    writer.close()
    store, others = backend.store("queue"), backend.store("queue*")
    others.close()
    other.close()
    assert set(keys(servers)) == {b"queue:train_0", b"queue:train_1"}
    store.drop("train_0")
    store.drop("never written")
    store._dropping.submit(int).result()  # its thread was there
    assert set(keys(servers)) == {b"queue:train_1"}
    store.close()
    assert keys(servers) == []


async def test_a_snapshot_gets_the_buffers_of_a_frame(backend: RedisBackend) -> None:
    storage, store = backend.storage(QueueSession("queue", 1)), backend.store("queue")
    frame = storage.write("train_0", columns(range(4)))
    buffers = await store.fetch("train_0", frame)
    asked = assignment((frame, 0, 4))
    read = assemble(asked, {(0, name): buffer.copy() for name, buffer in buffers.items()}, SPECS)
    assert_read(read, [0, 1, 2, 3])
    storage.close()
    store.close()


def test_rows_that_a_server_lost_are_named(backend: RedisBackend, servers: tuple[Server, Server]) -> None:
    storage = backend.storage(QueueSession("queue", 1))
    frame = storage.write("train_0", columns(range(4)))
    for server in servers:
        with server.client() as client:
            client.flushall()
    with pytest.raises(
        RuntimeError, match="socket has nothing of the 80 bytes of column 'tokens' in partition 'train_0'"
    ):
        storage.read(assignment((frame, 0, 4)), SPECS)
    with pytest.raises(ValueError, match="said to lie in unit 7 of 2"):
        storage.read(assignment((frame._replace(place=(7, 0)), 0, 4)), SPECS)
    storage.close()


def test_a_wrong_password_is_one_error_that_does_not_tell_it(servers: tuple[Server, Server]) -> None:
    backend = RedisBackend((f"unix://:secret-of-mine@{servers[0].path}",), inline_bytes=0)
    with pytest.raises(
        PermissionError, match=f"redis at unix://{servers[0].path} refused to tell of its memory"
    ) as error:
        backend.store("queue")
    assert "secret-of-mine" not in str(error.value) + repr(backend)
    with pytest.raises(ValueError, match=r"urls\[0\] is not redis://") as mistaken:
        RedisBackend(("http://:secret-of-mine@here",))
    assert "secret-of-mine" not in str(mistaken.value)


def test_a_server_that_may_evict_rows_is_refused() -> None:
    with redis_server("maxmemory 10mb", "maxmemory-policy allkeys-lru") as server:
        with pytest.raises(ValueError, match="may evict rows: set its maxmemory-policy to noeviction, not allkeys-lru"):
            RedisBackend((server.url,)).store("queue")


def test_a_full_server_refuses_the_put(servers: tuple[Server, Server]) -> None:
    with redis_server("maxmemory 3mb") as server:
        storage = RedisBackend((server.url,)).storage(QueueSession("queue", 1))
        with pytest.raises(RuntimeError, match="could not write to partition 'train_0': .*maxmemory"):
            for _ in range(100):
                storage.write("train_0", {"reward": np.zeros(100_000, np.float32)})
        storage.close()


def test_a_server_that_hangs_or_is_gone_is_named() -> None:
    with redis_server() as server:
        backend = RedisBackend((server.url,), timeout_s=0.2, inline_bytes=0)
        patient = replace(backend, timeout_s=60)
        storage, store = backend.storage(QueueSession("queue", 1)), patient.store("queue")
        frame = patient.storage(QueueSession("queue", 2)).write("train_0", columns(range(4)))
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=f"redis at unix://{server.path} took more than 0.2 s to write to"):
            storage.write("train_0", columns(range(4)))
        store.drop("train_0")  # waits for nothing
        server.process.kill()
        server.process.wait()
        with pytest.raises(ConnectionError, match="could not read partition 'train_0'") as error:
            storage.read(assignment((frame, 0, 4)), SPECS)
        assert server.password not in str(error.value)
        with pytest.raises(ConnectionError, match="could not list its keys"):
            store.close()
        storage.close()


def test_what_a_server_could_not_drop_goes_with_the_next_drop() -> None:
    with redis_server() as server, server.client() as client:
        backend = RedisBackend((server.url,), inline_bytes=0)
        storage, store = backend.storage(QueueSession("queue", 1)), backend.store("queue")
        for partition in ("train_0", "train_1"):
            storage.write(partition, columns(range(4)))
        client.acl_setuser("default", enabled=True, commands=["-unlink"], keys=["*"])
        store.drop("train_0")
        store._dropping.submit(int).result()  # its thread was there
        assert client.dbsize() == 2
        client.acl_setuser("default", enabled=True, commands=["+unlink"], keys=["*"])
        store.drop("train_1")
        store._dropping.submit(int).result()
        assert client.dbsize() == 0
        store.close()
        storage.close()


SPEC = QueueSpec(
    SPECS,
    {
        "score": TaskSpec(("tokens",), policy="ready"),
        "train": TaskSpec(("tokens", "reward"), whole_groups=True, lease_s=60),
    },
)


async def test_a_get_that_fails_gives_its_rows_back(backend: RedisBackend, servers: tuple[Server, Server]) -> None:
    with QueueProcess.start(SPEC, backend) as process:
        queue = process.queue
        await queue.create_partition("train_0", range(4))
        await queue.put("train_0", range(4), columns(range(4)))
        for server in servers:
            with server.client() as client:
                client.flushall()
        with pytest.raises(RuntimeError, match="has nothing of the 80 bytes of column 'tokens'"):
            await queue.get("train", 4, timeout_s=60)
        described = await queue.describe()
        assert described["open_leases"] == 0 and described["partitions"]["train_0"]["tasks"]["train"]["ready"] == 4


@pytest.mark.slow
def test_the_queue_in_redis_behaves_as_its_model_and_leaves_nothing_there(servers: tuple[Server, Server]) -> None:
    backend = RedisBackend(tuple(server.url for server in servers), inline_bytes=256)
    least = dict.fromkeys(TASKS, 2) | {"deaths": 1}
    run_machine(lambda: SocketSide(UNTIMED, backend), cases=12, steps=40, least=least)
    assert keys(servers) == []
