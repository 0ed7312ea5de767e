"""A queue in a folder: what is damaged, missing or of another queue says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.transfer_queue.control.spec import GetRequest
from harness.transfer_queue.journal.files import DamagedFile, read_records
from tests.support.queue_in_a_folder import SPEC, Queue, journaled


async def written(folder: Path) -> tuple[Path, list[tuple[int, Any]]]:
    """A journal, and what was told when it had each of these sizes."""
    with journaled(folder) as queue:
        path = folder / "journal-0.log"
        told = [(path.stat().st_size, queue.told())]
        await queue.service.create_partition("a", range(4))
        told.append((path.stat().st_size, queue.told()))
        for rows in ([1, 0], [3]):
            queue.put(rows)
            told.append((path.stat().st_size, queue.told()))
            queue.service.try_get(GetRequest("train", 2, minimum=1, consumer="x"))
            told.append((path.stat().st_size, queue.told()))
    return path, told


async def test_a_torn_tail_is_left_out_wherever_it_was_torn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, told = await written(tmp_path)
    whole = path.read_bytes()
    starts = [record.start for record in read_records(path)]
    for size in range(told[0][0], len(whole)):
        path.write_bytes(whole[:size])
        caplog.clear()
        assert Queue.loaded(tmp_path).told() == [state for at, state in told if at <= size][-1]
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
