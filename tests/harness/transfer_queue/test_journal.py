"""A queue in a folder goes on as it was; what is damaged, missing or of another queue is refused."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.transfer_queue import LeaseExpired, LocalQueue, Ragged
from harness.transfer_queue.control.spec import GetRequest, Status
from harness.transfer_queue.journal.files import DamagedFile, read_records
from harness.transfer_queue.journal.service import JournaledService, at_once, load, save
from harness.transfer_queue.rows.columns import Column
from harness.transfer_queue.rows.frames import BatchAssignment, Buffer, Frame
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.storage.inline import InlineStorage, inline_buffers
from tests.support.local_queue import virtual
from tests.support.queue_in_a_folder import SPEC, Queue, cells, journaled

# -- what a loaded queue knows


async def test_open_leases_have_the_seconds_left_that_they_had_and_late_ones_are_refused(tmp_path: Path) -> None:
    with journaled(tmp_path) as queue:
        await queue.service.create_partition("a", range(6))
        queue.put([0, 1, 2, 3, 4, 5])
        assert queue.get("train") == (0, [0, 1])
        queue.time += 7
        assert queue.get("train", consumer="y") == (1, [2, 3])
    loaded = Queue.loaded(tmp_path)
    loaded.time += 2.9
    assert loaded.get("train", 1) == (2, [4])
    loaded.time += 0.2
    assert loaded.get("train") == (3, [0, 1])
    with pytest.raises(LeaseExpired, match="lease 0 is over"):
        loaded.service.acknowledge(0)
    loaded.service.acknowledge(1)
    assert loaded.described()["partitions"]["a"]["tasks"]["train"]["done"] == 2


async def test_what_consumers_that_are_no_more_hold_is_named_and_can_be_released(tmp_path: Path) -> None:
    with journaled(tmp_path) as queue:
        await queue.service.create_partition("a", range(4))
        queue.put([0, 1, 2, 3])
        queue.get("train")
        queue.get("train", consumer="y")
        queue.service.acknowledge(1)
    loaded = Queue.loaded(tmp_path)
    (lease,) = loaded.service.open_leases()
    assert (lease.number, lease.task, lease.consumer, lease.share.partition) == (0, "train", "x", "a")
    loaded.service.release("x")
    assert loaded.get("train") == (2, [0, 1])


async def test_an_assignment_that_was_not_received_goes_out_again_and_one_that_was_received_does_not(
    tmp_path: Path,
) -> None:
    with journaled(tmp_path) as queue:
        await queue.service.create_partition("a", range(4))
        queue.put([0, 1, 2, 3])
        assert queue.get("score") == (0, [0, 1])
        answer = queue.service.try_get(GetRequest("score", 2, consumer="x"))
        assert isinstance(answer, BatchAssignment) and answer.lease == 1
    loaded = Queue.loaded(tmp_path)
    loaded.service.lose([lease.number for lease in loaded.service.open_leases()])
    assert loaded.get("score") == (2, [2, 3])


@virtual
async def test_a_local_queue_is_saved_and_loaded(tmp_path: Path) -> None:
    queue = LocalQueue(SPEC)
    await queue.create_partition("a", range(3))
    await queue.put("a", [2, 0, 1], cells([2, 0, 1]))
    assert (await queue.get("train", 2)) is not None
    await queue.save(tmp_path)
    loaded = LocalQueue.load(SPEC, tmp_path)
    batch = await loaded.get("train", 1)
    assert batch is not None and batch.rows.tolist() == [2] and batch.ragged("tokens").values.tolist() == [2, 3]
    assert [lease.number for lease in loaded.open_leases()] == [0, 1]
    described, before = await loaded.describe(), await queue.describe()
    assert (described["bytes"], described["column_bytes"]) == (before["bytes"], before["column_bytes"])


# -- in use


async def test_puts_gets_and_clears_go_on_while_a_queue_is_saved(tmp_path: Path) -> None:
    storage = UnitStorage()
    service = QueueService(SPEC, storage, lambda: 0.0)
    for name, start in (("a", 0), ("b", 10)):
        await service.create_partition(name, range(start, start + 2))
        rows = np.arange(start, start + 2)
        service.try_put(name, rows, storage.write(name, cells(rows.tolist())), {})
    steps = 0

    async def work(step: Callable[[], None]) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            await service.create_partition("c", range(20, 21))
            service.try_put("c", np.array([20]), storage.write("c", cells([20])), {})
            answer = service.try_get(GetRequest("score", 2, consumer="x"))
            assert isinstance(answer, BatchAssignment) and answer.rows.tolist() == [0, 1]
            service.received(answer.lease)
            service.clear("a")
            assert storage.kept("a"), "it is still to be saved"
        step()

    await save(service, tmp_path, work)
    assert steps > 1 and not storage.kept("a") and storage.kept("c")
    loaded = Queue.loaded(tmp_path)
    assert list(loaded.described()["partitions"]) == ["a", "b"]
    assert loaded.get("train") == (0, [0, 1]) and loaded.get("train") == (1, [10, 11])


async def test_payload_that_a_storage_has_is_in_the_journal_before_the_put_is_answered(tmp_path: Path) -> None:
    storage = UnitStorage()
    service = JournaledService(SPEC, storage, tmp_path, lambda: 0.0)
    await service.create_partition("a", range(4))
    frame = storage.write("a", cells([2, 1]))
    with pytest.raises(ValueError, match="row 9 is not in partition 'a'"):
        service.try_put("a", np.array([9, 1]), frame, {})
    assert not service.try_put("a", np.array([2, 1]), frame, {})
    await service.put("a", np.array([2, 1]), frame, {})
    service.end()
    loaded = load(SPEC, InlineStorage(), tmp_path, lambda: 0.0)
    answer = loaded.try_get(GetRequest("train", 2, consumer="x"))
    assert answer is Status.WAIT  # row 0 is not there yet
    frame = InlineStorage().write("a", cells([0]))
    loaded.try_put("a", np.array([0]), frame, {})
    answer = loaded.try_get(GetRequest("train", 3, consumer="x"))
    assert isinstance(answer, BatchAssignment)
    tokens = InlineStorage().read(answer, SPEC.columns)["tokens"]
    assert isinstance(tokens, Ragged) and tokens.values.tolist() == [1, 2, 3]


class UnitStorage:
    """Frames in numbered places, which are gone when their partition is dropped. Storage and PayloadStore at once."""

    waits = False
    pinned = False

    def __init__(self) -> None:
        self._frames: dict[tuple[int, int], tuple[str, Frame]] = {}

    def write(self, partition: str, columns: dict[str, Column]) -> Frame:
        place = (0, len(self._frames))
        self._frames[place] = partition, InlineStorage().write(partition, columns)
        return replace(self._frames[place][1], place=place)

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


async def test_a_save_that_fails_leaves_what_was_saved_before(tmp_path: Path) -> None:
    with journaled(tmp_path) as queue:
        await queue.service.create_partition("a", range(4))
        queue.put([0, 1])

        async def fail(step: Callable[[], None]) -> None:
            raise OSError(errno.ENOSPC, "no space")

        assert isinstance(queue.service, JournaledService)
        with pytest.raises(OSError, match="no space"):
            await queue.service.save(fail)
        queue.put([2])
        described = queue.described()
    assert Queue.loaded(tmp_path).described() == described
    with journaled(tmp_path) as queue:
        await queue.save()
    assert sorted(os.listdir(tmp_path)) == ["CURRENT", "journal-3.log", "snapshot-3.msgpack"]
    assert Queue.loaded(tmp_path).described() == described


async def test_a_folder_belongs_to_one_queue(tmp_path: Path) -> None:
    with journaled(tmp_path) as queue:
        for another in (lambda: Queue.journaled(tmp_path), lambda: Queue.loaded(tmp_path)):
            with pytest.raises(ValueError, match="in use by a queue"):
                another()
        with pytest.raises(ValueError, match="in use by a queue: save to another folder"):
            await save(queue.service, tmp_path, at_once)


async def test_nobody_else_enters_the_folder_of_a_journal(tmp_path: Path) -> None:
    with journaled(tmp_path / "rows"):
        assert stat.S_IMODE(os.stat(tmp_path / "rows").st_mode) == 0o700


async def written(folder: Path) -> tuple[Path, list[tuple[int, Any]]]:
    """A journal, and what was told when it had each of these sizes."""
    with journaled(folder) as queue:
        path = folder / "journal-0.log"
        described = [(path.stat().st_size, queue.described())]
        await queue.service.create_partition("a", range(4))
        described.append((path.stat().st_size, queue.described()))
        for rows in ([1, 0], [3]):
            queue.put(rows)
            described.append((path.stat().st_size, queue.described()))
            queue.service.try_get(GetRequest("train", 2, minimum=1, consumer="x"))
            described.append((path.stat().st_size, queue.described()))
    return path, described


async def test_a_torn_tail_is_left_out_wherever_it_was_torn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, described = await written(tmp_path)
    whole = path.read_bytes()
    starts = [record.start for record in read_records(path)]
    for size in range(described[0][0], len(whole)):
        path.write_bytes(whole[:size])
        caplog.clear()
        assert Queue.loaded(tmp_path).described() == [state for at, state in described if at <= size][-1]
        assert ("the process that wrote it died" in caplog.text) == (size not in starts)


async def test_a_damaged_byte_anywhere_is_one_error_that_names_file_and_offset(tmp_path: Path) -> None:
    path, _ = await written(tmp_path)
    whole = path.read_bytes()
    starts = [record.start for record in read_records(path)]
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        start = max(start for start in starts if start <= at)
        with pytest.raises(DamagedFile, match=f"journal-0.log is damaged: the record at offset {start} is not"):
            Queue.loaded(tmp_path)


async def test_a_damaged_snapshot_is_one_error(tmp_path: Path) -> None:
    with journaled(tmp_path) as queue:
        await queue.service.create_partition("a", range(4))
        queue.put([0])
        await queue.save()
    path = tmp_path / "snapshot-1.msgpack"
    whole = path.read_bytes()
    starts = [record.start for record in read_records(path)]
    for size in [*starts, starts[-1] - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedFile, match=r"snapshot-1.msgpack (ends \d+ bytes into|is damaged)"):
            Queue.loaded(tmp_path)


async def test_a_journal_that_is_missing_between_others_is_an_error(tmp_path: Path) -> None:
    for _ in range(3):
        with journaled(tmp_path) as queue:
            queue.service.describe()
    (tmp_path / "journal-1.log").unlink()
    with pytest.raises(DamagedFile, match="journal-2.log continues number 1, but what is there ends with 0"):
        Queue.loaded(tmp_path)


@pytest.mark.parametrize("later", [0, 1])
async def test_a_journal_that_is_missing_behind_its_snapshot_is_an_error(tmp_path: Path, later: int) -> None:
    with journaled(tmp_path) as queue:
        await queue.save()
    for _ in range(later):
        with journaled(tmp_path):
            pass
    (tmp_path / "journal-1.log").unlink()
    with pytest.raises(DamagedFile, match=r"journal-1.log is not there, and with it what changed after snapshot-1"):
        Queue.journaled(tmp_path)


@pytest.mark.parametrize("emptied", [b"", b"1", b"one\n", b"\xff\x00", b"9" * 5000 + b"\n"])
async def test_a_folder_that_names_no_snapshot_is_an_error(tmp_path: Path, emptied: bytes) -> None:
    with journaled(tmp_path) as queue:
        await queue.save()
    (tmp_path / "CURRENT").write_bytes(emptied)
    for opened in (Queue.journaled, Queue.loaded):
        with pytest.raises(DamagedFile, match="CURRENT is damaged: it names no snapshot"):
            opened(tmp_path)


@pytest.mark.parametrize("taken", [("snapshot-1.msgpack",), ("snapshot-1.msgpack", "journal-1.log")])
async def test_a_snapshot_that_is_missing_is_an_error(tmp_path: Path, taken: tuple[str, ...]) -> None:
    with journaled(tmp_path) as queue:
        await queue.save()
    for name in taken:
        (tmp_path / name).unlink()
    for opened in (Queue.journaled, Queue.loaded):
        with pytest.raises(DamagedFile, match="snapshot-1.msgpack is not there, though CURRENT names it"):
            opened(tmp_path)


async def test_another_spec_is_refused_and_told_apart(tmp_path: Path) -> None:
    with journaled(tmp_path):
        pass
    train = replace(SPEC.tasks["train"], lease_s=11.0, policy="ready")
    other = replace(SPEC, tasks={"train": train}, capacity_rows=5)
    with pytest.raises(ValueError, match="is of another queue") as error:
        Queue.loaded(tmp_path, other)
    for difference in (
        "spec.tasks.score is only there",
        "spec.tasks.train.policy is 'fifo' there, 'ready' here",
        "spec.tasks.train.lease_s is 10 there, 11.0 here",
        "spec.capacity_rows is None there, 5 here",
    ):
        assert difference in str(error.value)


async def test_a_folder_without_a_queue_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no queue was saved in .*: there is no such folder"):
        Queue.loaded(tmp_path / "none")
    with pytest.raises(ValueError, match="no queue was saved in"):
        Queue.loaded(tmp_path)
