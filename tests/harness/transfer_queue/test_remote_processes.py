"""The queue in a process of its own, and what becomes of it and of its clients when one of them is killed."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.remote.sync_client import SyncQueue
from tests.support.remote_queue import SPEC, descriptors, ids, rewards, tokens


@pytest.fixture
def process() -> Iterator[QueueProcess]:
    before = descriptors()
    with QueueProcess.start(SPEC) as process:
        yield process
    assert descriptors() == before


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
    told = os.read(reader, 4)
    os.close(reader)
    assert told == b"done", "the child failed"
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


def test_the_connection_ends_with_its_event_loop(process: QueueProcess) -> None:
    async def lease() -> None:
        await process.queue.create_partition("a", range(4))
        await process.queue.put("a", range(4), tokens(range(4)) | rewards(range(4)))
        assert ids(await process.queue.get("train", 4)) == [0, 1, 2, 3]

    asyncio.run(lease())
    with process.sync() as queue:
        assert ids(queue.get("train", 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("where", "written"), [("_reply", 0), ("_decoded", 4)])
def test_an_interrupted_call_takes_nothing(
    process: QueueProcess, monkeypatch: pytest.MonkeyPatch, where: str, written: int
) -> None:
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


def test_the_server_imports_neither_torch_nor_ray() -> None:
    code = "import sys, harness.transfer_queue.remote.process; print({'torch', 'ray'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120, check=True)
    assert told.stdout == b"set()\n"


def test_a_process_that_cannot_start_says_so() -> None:
    with pytest.raises(RuntimeError, match="ended with 1"):
        QueueProcess.start(SPEC, address="tcp:127.0.0.1:0")  # shared memory does not go over it
