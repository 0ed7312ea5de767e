"""A saved queue goes on as it was, whenever a process died; what is damaged, missing or of another queue is refused."""

import asyncio
import errno
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.rpc.handshake import greet_blocking
from harness.rpc.sockets import HEADER, socket_address
from harness.transfer_queue import ColumnSpec, LeaseExpired, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.control.spec import GetRequest
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.rows.columns import Column
from harness.transfer_queue.rows.frames import BatchAssignment, Buffer, Frame
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.snapshots.files import DamagedSnapshot, RecordWriter, read_records
from harness.transfer_queue.snapshots.snapshot import save
from harness.transfer_queue.storage.inline import InlineBackend, InlineStorage, inline_buffers
from harness.transfer_queue.storage.protocol import QueueBackend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.project import ROOT
from tests.support.queue_in_a_folder import SPEC, Queue, cells

# -- what a loaded queue knows


async def test_open_leases_have_the_seconds_left_that_they_had_and_late_ones_are_refused(tmp_path: Path) -> None:
    queue = await Queue.of(range(6))
    assert queue.get("train") == (0, [0, 1])
    queue.time += 7
    assert queue.get("train", consumer="y") == (1, [2, 3])
    await queue.save(tmp_path)
    loaded = Queue(tmp_path)
    loaded.time += 2.9
    assert loaded.get("train", 1) == (2, [4])
    loaded.time += 0.2
    assert loaded.get("train") == (3, [0, 1])
    with pytest.raises(LeaseExpired, match="lease 0 is over"):
        loaded.service.acknowledge(0)
    loaded.service.acknowledge(1)
    assert loaded.described()["partitions"]["a"]["tasks"]["train"]["done"] == 2


async def test_what_consumers_that_are_no_more_hold_is_named_and_can_be_released(tmp_path: Path) -> None:
    queue = await Queue.of(range(4))
    queue.get("train")
    queue.get("train", consumer="y")
    queue.service.acknowledge(1)
    await queue.save(tmp_path)
    loaded = Queue(tmp_path)
    (lease,) = loaded.service.open_leases()
    assert (lease.number, lease.task, lease.consumer, lease.share.partition) == (0, "train", "x", "a")
    loaded.service.release("x")
    assert loaded.get("train") == (2, [0, 1])


async def test_an_assignment_that_was_not_received_goes_out_again(tmp_path: Path) -> None:
    queue = await Queue.of(range(4))
    assert queue.get("score") == (0, [0, 1])
    answer = queue.service.try_get(GetRequest("score", 2, consumer="x"))
    assert isinstance(answer, BatchAssignment) and answer.lease == 1
    await queue.save(tmp_path)
    loaded = Queue(tmp_path)
    loaded.service.lose([lease.number for lease in loaded.service.open_leases()])
    assert loaded.get("score") == (2, [2, 3])


# -- in use


async def test_puts_gets_and_clears_go_on_while_a_queue_is_saved(tmp_path: Path) -> None:
    storage = UnitStorage()
    service = QueueService(SPEC, storage, lambda: 0.0)
    for name, start in (("a", 0), ("b", 10)):
        await service.create_partition(name, range(start, start + 2))
        rows = np.arange(start, start + 2)
        service.put(name, rows, storage.write(name, cells(rows.tolist())), {})
    steps = 0

    async def work(step: Callable[[], None]) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            await service.create_partition("c", range(20, 21))
            service.put("c", np.array([20]), storage.write("c", cells([20])), {})
            answer = service.try_get(GetRequest("score", 2, consumer="x"))
            assert isinstance(answer, BatchAssignment) and answer.rows.tolist() == [0, 1]
            service.received(answer.lease)
            service.clear("a")
            assert storage.kept("a"), "it is still to be saved"
        step()

    await save(service, tmp_path, work)
    assert steps > 1 and not storage.kept("a") and storage.kept("c")
    loaded = Queue(tmp_path)
    assert list(loaded.described()["partitions"]) == ["a", "b"]
    assert loaded.get("train") == (0, [0, 1]) and loaded.get("train") == (1, [10, 11])


class UnitStorage:
    """Frames in numbered places, which are gone when their partition is dropped. Storage and PayloadStore at once."""

    waits = False
    pinned = False

    def __init__(self) -> None:
        self._frames: dict[tuple[int, int], tuple[str, Frame]] = {}

    def write(self, partition: str, columns: dict[str, Column]) -> Frame:
        place = (0, len(self._frames))
        self._frames[place] = partition, InlineStorage().write(partition, columns)
        return self._frames[place][1]._replace(place=place)

    def kept(self, partition: str) -> bool:
        return any(name == partition for name, _ in self._frames.values())

    def drop(self, partition: str) -> None:
        self._frames = {place: kept for place, kept in self._frames.items() if kept[0] != partition}

    async def fetch(self, partition: str, frame: Frame) -> dict[str, Buffer]:
        await asyncio.sleep(0)
        assert isinstance(frame.place, tuple)
        return inline_buffers(self._frames[frame.place][1])

    def close(self) -> None:
        self._frames.clear()


# -- deaths, and what fails


async def saved(folder: Path) -> list[Any]:
    """What was told when a queue was saved in the folder, twice; something changed between."""
    queue, described = Queue(), []
    await queue.service.create_partition("a", range(4))
    for row in (0, 1):
        queue.put([row])
        described.append(queue.described())
        await queue.save(folder)
    return described


async def test_a_save_that_fails_leaves_what_was_saved_before(tmp_path: Path) -> None:
    queue = Queue()
    await queue.service.create_partition("a", range(4))
    queue.put([0, 1])
    await queue.save(tmp_path)
    described = queue.described()
    queue.put([2])

    async def fail(step: Callable[[], None]) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match="no space"):
        await queue.save(tmp_path, fail)
    assert Queue(tmp_path).described() == described
    await queue.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["snapshot.msgpack"]
    assert Queue(tmp_path).described() == queue.described() != described


async def test_one_at_a_time_saves_to_a_folder_or_loads_from_it(tmp_path: Path) -> None:
    queue = Queue()

    async def meanwhile(step: Callable[[], None]) -> None:
        with pytest.raises(ValueError, match="is in use: a queue is being saved there"):
            await Queue().save(tmp_path)
        with pytest.raises(ValueError, match="is in use"):
            Queue(tmp_path)
        step()

    await queue.save(tmp_path, meanwhile)
    assert Queue(tmp_path).described() == queue.described()


async def test_a_saved_queue_is_its_owners_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    await Queue().save(tmp_path / "rows")
    assert stat.S_IMODE(os.stat(tmp_path / "rows").st_mode) == 0o700
    last = kill_amid_saves(tmp_path)
    written = Queue(tmp_path).described()["partitions"]["a"]["written"]["reward"]
    assert written in (last + 1, last + 2)


class Died(BaseException):
    """In place of the end of the process."""


class Mortal:
    """Dies before the n-th step that reaches the disk; none is taken afterwards. None: lives, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, death: int | None) -> None:
        self.steps = 0
        self._death = death
        monkeypatch.setattr(RecordWriter, "append", self._mortal(RecordWriter.append))
        for name in ("fsync", "fdatasync", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._mortal(getattr(os, name)))

    def _mortal(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            if self._death is not None and self.steps > self._death:
                raise Died
            return call(*args, **kwargs)

        return step


async def test_whenever_it_dies_while_it_is_saved_what_was_saved_last_can_be_loaded(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mortal = Mortal(patch, None)
        first, second = await saved(tmp_path / "whole")
    assert mortal.steps > 10
    for death in range(mortal.steps):
        folder = tmp_path / str(death)
        with pytest.MonkeyPatch.context() as patch, suppress(Died):
            Mortal(patch, death)
            await saved(folder)
        if not (folder / "snapshot.msgpack").exists():
            with pytest.raises(ValueError, match="no queue was saved in"):
                Queue(folder)
            continue
        loaded = Queue(folder)
        assert loaded.described() in (first, second), death
        await loaded.service.create_partition("c", range(20, 21))
        await loaded.save(folder)
        assert Queue(folder).described() == loaded.described()


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.support.queue_in_a_folder import Queue

async def main():
    queue = Queue()
    await queue.service.create_partition("a", range(100_000))
    for i in range(100_000):
        queue.put([i])
        await queue.save(Path(sys.argv[1]))
        print(i, flush=True)

asyncio.run(main())
"""


def kill_amid_saves(folder: Path) -> int:
    """The last number that the process told."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(20)]
        process.kill()
        lines += process.stdout.readlines()
    return max(int(line) for line in lines if line.endswith(b"\n"))


# -- what is not what was written


async def test_a_damaged_byte_anywhere_and_a_torn_end_are_one_error_that_names_file_and_offset(tmp_path: Path) -> None:
    await saved(tmp_path)
    path = tmp_path / "snapshot.msgpack"
    whole = path.read_bytes()
    starts = [record.start for record in read_records(path)]
    for at in sorted({*starts, *range(0, len(whole), 7)}):
        start = max(start for start in starts if start <= at)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(DamagedSnapshot, match=f"snapshot.msgpack is damaged: the record at offset {start} is not"):
            Queue(tmp_path)
        path.write_bytes(whole[:at])
        torn = f"ends {at - start} bytes into a record, at offset {start}" if at > start else "is damaged: it ends"
        with pytest.raises(DamagedSnapshot, match=f"snapshot.msgpack {torn}"):
            Queue(tmp_path)


async def test_a_folder_without_a_queue_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no queue was saved in .*: there is no such folder"):
        Queue(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no queue was saved in"):
        Queue(tmp_path / "empty")


async def test_another_spec_is_refused_and_told_apart(tmp_path: Path) -> None:
    await saved(tmp_path)
    train = replace(SPEC.tasks["train"], lease_s=11.0, policy="ready")
    other = replace(SPEC, tasks={"train": train}, capacity_rows=5)
    with pytest.raises(ValueError, match="is of another queue") as error:
        Queue(tmp_path, other)
    for difference in (
        "spec.tasks.score is only there",
        "spec.tasks.train.policy is 'fifo' there, 'ready' here",
        "spec.tasks.train.lease_s is 10 there, 11.0 here",
        "spec.capacity_rows is None there, 5 here",
    ):
        assert difference in str(error.value)


# -- other processes

LARGE = QueueSpec(
    {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float64")},
    {"score": TaskSpec(("reward",)), "train": TaskSpec(("tokens", "reward"), lease_s=600.0)},
)
LENGTH = 4096
BACKENDS = pytest.mark.parametrize("backend", [ShmBackend(), InlineBackend()], ids=["shm", "inline"])


def large(rows: list[int]) -> dict[str, Column]:
    """More than travels in a message, where there is another way."""
    tokens = Ragged.from_rows([np.full(LENGTH, row) for row in rows], np.int64)
    return {"tokens": tokens, "reward": np.array(rows, np.float64)}


def get(queue: SyncQueue, task: str, consumer: str = "x") -> tuple[int, list[int]]:
    batch = queue.get(task, 2, consumer=consumer, timeout_s=60)
    assert batch is not None
    assert batch.dense("reward").tolist() == batch.rows.tolist()
    if task == "train":
        assert np.array_equal(batch.ragged("tokens").values, np.repeat(batch.rows, LENGTH))
    return batch.lease, batch.rows.tolist()


@BACKENDS
def test_a_queue_is_saved_while_in_use_and_resumed_more_than_once(tmp_path: Path, backend: QueueBackend) -> None:
    folder = str(tmp_path / "checkpoint")
    with QueueProcess.start(LARGE, backend, saves=str(tmp_path)) as first, first.sync() as queue:
        queue.create_partition("a", range(8))
        queue.put("a", [1, 0, 2], large([1, 0, 2]))
        queue.put("a", [3], {"reward": np.array([3.0])})
        assert (get(queue, "score"), get(queue, "train", "y")) == ((0, [0, 1]), (1, [0, 1]))
        queue.save(folder)
        queue.clear_finished()
        first.process.kill()
    for _ in range(2):
        with QueueProcess.start(LARGE, backend, resume=folder) as again, again.sync() as queue:
            queue.acknowledge(1)
            queue.put("a", [3], {"tokens": large([3])["tokens"]})
            assert (get(queue, "score"), get(queue, "train")) == ((2, [2, 3]), (3, [2, 3]))
            queue.clear_finished()


def test_what_the_process_of_a_queue_logs_says_of_which_run_and_role_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with QueueProcess.start(LARGE, run="bench/a_cell/seed=0") as process:
        endpoint = process.queue.endpoint
        family, place = socket_address(endpoint.address)
        with socket.socket(family) as sock:
            sock.connect(place)
            greet_blocking(sock, endpoint.token, "the transfer queue", endpoint.address)
            sock.sendall(HEADER.pack(100, 0, 1))
        with process.sync() as queue:
            queue.describe()  # what the other said has arrived
    (line,) = capfd.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["run"], told["role"], told["level"]) == ("bench/a_cell/seed=0", "queue", "warning")
    assert told["message"] == "client 1: the stream ended 10 bytes into a frame"
