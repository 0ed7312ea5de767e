"""The example of a storage from outside, with a real Mooncake store over TCP.

Its master is started here; the queue's process lends the memory.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.transfer_queue.control.spec import QueueSpec, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.storage.protocol import QueueSession
from tests.support.storages import SPECS, assert_read, assignment, columns, tokens

pytest.importorskip("mooncake.store", reason="needs mooncake-transfer-engine-non-cuda", exc_type=ImportError)
from examples.queue_storage.mooncake_storage import MooncakeBackend  # noqa: E402

START_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    port = free_port()
    described = [
        f"--rpc_port={port}",
        "--rpc_address=127.0.0.1",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={free_port()}",
    ]
    program = Path(sys.executable).parent / "mooncake_master"
    with subprocess.Popen(
        [program, *described], stderr=subprocess.DEVNULL, env=os.environ | {"MC_FORCE_TCP": "1"}
    ) as process:
        until = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < until:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    break
        yield f"127.0.0.1:{port}"
        process.kill()


@pytest.fixture
def backend(master: str) -> MooncakeBackend:
    return MooncakeBackend(master, lent_bytes=32 << 20, buffer_bytes=16 << 20, inline_bytes=0)


async def test_frames_are_read_by_another_and_dropped(backend: MooncakeBackend) -> None:
    store = backend.store("queue")
    writer, reader = backend.storage(QueueSession("queue", 1)), backend.storage(QueueSession("queue", 2))
    first, second = writer.write("train_0", columns(range(8))), writer.write("train_0", columns(range(8, 12)))
    assert_read(reader.read(assignment((first, 2, 5), (second, 0, 4)), SPECS), [2, 3, 4, 8, 9, 10, 11])
    assert list(reader.read(assignment((first, 0, 8), names=("reward",)), SPECS)) == ["reward"]
    assert (await store.fetch("train_0", first))["reward"].size == 32
    refused = writer.write("train_0", columns(range(4)))
    writer.discard("train_0", refused)
    with pytest.raises(RuntimeError, match="has 0 bytes of the 80 bytes of column 'tokens' in partition 'train_0'"):
        reader.read(assignment((refused, 0, 4)), SPECS)
    store.drop("train_0")
    store._dropping.submit(int).result()  # its thread was there
    with pytest.raises(RuntimeError, match="has 0 bytes of the"):
        reader.read(assignment((first, 0, 8)), SPECS)
    for storage in (writer, reader, store):
        storage.close()


def test_a_full_store_refuses_the_put_and_evicts_nothing(backend: MooncakeBackend) -> None:
    store, storage = backend.store("queue"), backend.storage(QueueSession("queue", 1))
    first = storage.write("train_0", columns(range(4)))
    with pytest.raises(RuntimeError, match="could not write to partition 'train_0'.*no memory is left in the store"):
        for _ in range(40):
            storage.write("train_0", {"reward": np.zeros(1 << 18, np.float32)})
    with pytest.raises(RuntimeError, match="larger than the buffer of this process"):
        storage.write("train_0", {"reward": np.zeros(5 << 20, np.float32)})
    assert_read(storage.read(assignment((first, 0, 4)), SPECS), [0, 1, 2, 3])
    storage.close()
    store.close()


def test_a_master_that_is_not_there_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=f"no mooncake_master listens on '{address}'"):
        MooncakeBackend(address).store("queue")


async def test_a_queue_streams_through_the_store(backend: MooncakeBackend) -> None:
    spec = QueueSpec(SPECS, {"train": TaskSpec(("tokens", "reward"))})
    with QueueProcess.start(spec, backend) as process:
        await process.queue.create_partition("train_0", range(64))
        for start in range(0, 64, 8):
            some = range(start, start + 8)
            await process.queue.put("train_0", some, {"tokens": tokens(some)})
        await process.queue.put("train_0", range(64), {"reward": np.arange(64, dtype=np.float32)})
        while (batch := await process.queue.get("train", 12, partition="train_0", timeout_s=60)) is not None:
            assert batch.dense("reward").tolist() == batch.rows.tolist()
            assert np.array_equal(batch.ragged("tokens").values, tokens(range(64)).take(batch.rows).values)
        assert await process.queue.clear_finished() == ["train_0"]
