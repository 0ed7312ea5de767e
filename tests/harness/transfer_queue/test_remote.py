"""The queue behind a socket, in processes of their own, and what becomes of each when one of them is killed."""

import asyncio
import errno
import gc
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.rows.frames import Frame
from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.protocol import QueueBackend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.remote_queue import SPEC, Stranger, descriptors, endpoint_of, ids, rewards, serving, tokens, until

BACKENDS = pytest.mark.parametrize(
    ("backend", "address"),
    [(ShmBackend(), None), (ShmBackend(0, 0), None), (InlineBackend(), None), (InlineBackend(), "tcp:127.0.0.1:0")],
    ids=["shm", "shm without copies", "inline", "tcp"],
)


@BACKENDS
async def test_what_one_writes_another_reads(backend: QueueBackend, address: str | None) -> None:
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
async def test_a_blocking_client_does_the_same(backend: QueueBackend, address: str | None) -> None:
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


async def test_a_process_whose_consumers_were_all_released_does_nothing_any_more() -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(4))
        await queue.put("a", range(4), tokens(range(4)))
        with SyncQueue(endpoint_of(server)) as cut_off:
            taken = [ids(await asyncio.to_thread(cut_off.get, "score", 1, consumer=one)) for one in ("engine", "other")]
            assert taken == [[0], [1]]
            await queue.release("engine")
            assert ids(await asyncio.to_thread(cut_off.get, "score", 1, consumer="other")) == [0], "others are there"
            await queue.release("other")
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(cut_off.get, "score", 1, consumer="engine")
        assert ids(await queue.get("score", 4, consumer="next")) == [0, 1, 2, 3]


async def test_what_the_file_system_refuses_reaches_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(InlineBackend(), saves="/proc") as (_, queue):
        with pytest.raises(FileNotFoundError) as refused:
            await queue.save("/proc/no place for a queue")
        assert refused.value.errno == errno.ENOENT and not caplog.records


async def test_calls_of_one_client_keep_their_order_and_wait_beside_each_other() -> None:
    async with serving() as (_, queue):
        await queue.create_partition("a", range(4))
        gets = [asyncio.create_task(queue.get("score", 1, consumer=str(i))) for i in range(4)]
        await until(queue, lambda waiting: len(waiting) == 4)
        await queue.put("a", range(4), tokens(range(4)))
        assert sorted([row for batch in await asyncio.gather(*gets) for row in ids(batch)]) == [0, 1, 2, 3]
    async with serving() as (server, _), Stranger.at(server) as stranger:
        rows = np.arange(2).tobytes()
        frame = Frame(2, {"reward": 8}, bytes(8))
        for call, request in enumerate((m.CreatePartition("a", rows, 1, None), m.Put("a", rows, frame, {})), 2):
            await stranger.say(call, m.encode(request))
        assert [await stranger.hear() for _ in range(2)] == [(2, m.Done()), (3, m.Done())]


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


@pytest.fixture
def process() -> Iterator[QueueProcess]:
    before = descriptors()
    with QueueProcess.start(SPEC) as process:
        yield process
    assert descriptors() <= before  # fewer where garbage of others had some


def in_a_fork(work: Callable[[], Any]) -> int:
    """A child that does this work and then waits to be killed; returns once it waits, with its pid."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(writer, b"done")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    described = os.read(reader, 4)
    os.close(reader)
    assert described == b"done", "the child failed"
    return pid


def is_open(descriptor: int, file: os.stat_result) -> bool:
    """Whether it is still this file."""
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_killed_reader_gives_back_what_it_did_not_acknowledge(process: QueueProcess) -> None:
    with process.sync() as queue:
        queue.create_partition("a", range(4))
        queue.put("a", range(4), tokens(range(4)) | rewards(range(4)))
        taken: list[Any] = []

        def read() -> None:
            other = process.sync()
            taken.append((other, other.get("train", 3)))

        pid = in_a_fork(read)
        assert queue.describe()["partitions"]["a"]["tasks"]["train"]["handed_out"] == 3
        kill(pid)
        assert ids(queue.get("train", 4)) == [0, 1, 2, 3]


def test_what_a_killed_writer_had_put_stays_readable(process: QueueProcess) -> None:
    with process.sync() as queue:
        queue.create_partition("a", range(4))

        kept: list[SyncQueue] = []

        def write() -> None:
            kept.append(process.sync())
            kept[0].put("a", range(4), tokens(range(4)))

        kill(in_a_fork(write))
        assert ids(queue.get("score", 4)) == [0, 1, 2, 3]


def test_a_killed_server_fails_every_call_at_once(process: QueueProcess) -> None:
    async def both() -> None:
        await process.queue.create_partition("a", range(4))
        await process.queue.put("a", range(4), tokens(range(4)))
        batch = await process.queue.get("score", 4)
        pending = asyncio.create_task(process.queue.get("train", 1))
        blocking = asyncio.create_task(asyncio.to_thread(block))
        async with asyncio.timeout(60):
            while len(await process.queue.waiting()) < 2:
                pass
        process.process.kill()
        for call in (pending, blocking):
            with pytest.raises(ConnectionError, match="is lost"):
                await call
        with pytest.raises(ConnectionError, match="is lost"):
            await process.queue.put("a", range(4), rewards(range(4)))
        assert ids(batch) == [0, 1, 2, 3]

    def block() -> None:
        with process.sync() as queue:
            queue.get("train", 1)

    asyncio.run(both())


def test_a_forked_child_has_a_connection_of_its_own(process: QueueProcess) -> None:
    with process.sync() as queue:
        queue.create_partition("a", range(8))
        queue.put("a", range(4), tokens(range(4)))
        link: Any = queue._connected()
        inherited = [link._sock.fileno(), link.storage._segments["a"].descriptor]
        was = [os.fstat(number) for number in inherited]

        def work() -> None:
            assert not any(is_open(number, as_was) for number, as_was in zip(inherited, was, strict=True))
            queue.put("a", range(4, 8), tokens(range(4, 8)))
            assert ids(queue.get("score", 1)) == [0]

        pid = in_a_fork(work)
        assert ids(queue.get("score", 7)) == list(range(1, 8))
        queue.put("a", range(8), rewards(range(8)))
        kill(pid)
        assert ids(queue.get("train", 8)) == list(range(8))


def test_an_event_loop_in_a_forked_child_connects_anew(process: QueueProcess) -> None:
    with asyncio.Runner() as runner:
        runner.run(process.queue.create_partition("a", range(4)))
        runner.run(process.queue.put("a", range(4), tokens(range(4))))

        def work() -> None:
            async def read() -> list[int]:
                return ids(await process.queue.get("score", 2))

            with asyncio.Runner() as other:
                assert other.run(read()) == [0, 1]

        kill(in_a_fork(work))
        assert ids(runner.run(process.queue.get("score", 2))) == [2, 3]


def test_the_connection_ends_with_its_event_loop_and_holds_neither(process: QueueProcess) -> None:
    async def lease() -> None:
        loops.add(asyncio.get_running_loop())
        await process.queue.create_partition("a", range(4))
        await process.queue.put("a", range(4), tokens(range(4)) | rewards(range(4)))
        assert ids(await process.queue.get("train", 4)) == [0, 1, 2, 3]

    loops = weakref.WeakSet[asyncio.AbstractEventLoop]()
    asyncio.run(lease())
    gc.collect()
    assert not loops
    with process.sync() as queue:
        assert ids(queue.get("train", 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("where", "written"), [("_reply", 0), ("_decoded", 4)])
def test_an_interrupt_takes_nothing(process: Any, monkeypatch: pytest.MonkeyPatch, where: str, written: int) -> None:
    """Before there was an answer, and when it had come."""
    with process.sync() as queue, process.sync() as other:
        queue.create_partition("a", range(4))
        queue.put("a", range(written), tokens(range(written)))

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(queue._connected(), where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                queue.get("score", 4)
        with pytest.raises(ConnectionError, match="interrupted"):
            queue.describe()
        other.put("a", range(written, 4), tokens(range(written, 4)))
        assert ids(other.get("score", 4)) == [0, 1, 2, 3]


STARTS_ONE = """
import os
from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess
process = QueueProcess.start(QueueSpec({"a": ColumnSpec("int8")}, {"t": TaskSpec(("a",))}))
print(process.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_server_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.run([sys.executable, "-c", STARTS_ONE], stdout=subprocess.PIPE, timeout=120)
    assert parent.returncode == -signal.SIGKILL
    try:
        server = os.pidfd_open(int(parent.stdout))
    except ProcessLookupError:  # already
        return
    with os.fdopen(server, closefd=True) as ended:
        assert select.select([ended], [], [], 120)[0]


def test_the_server_imports_little_and_says_where_it_cannot_start() -> None:
    code = "import sys, harness.transfer_queue.remote.process; print({'torch', 'ray'} & set(sys.modules))"
    described = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120, check=True)
    assert described.stdout == b"set()\n"
    with pytest.raises(ConnectionError, match="ended with exit code 1 before it was ready"):
        QueueProcess.start(SPEC, address="tcp:127.0.0.1:0")  # shared memory does not go over it
    assert m.decode_answer(m.encode(m.Done([np.int64(3), np.float32(0.5)]))) == m.Done([3, 0.5])
