"""Whenever a queue with a journal dies, what it had answered can be loaded: by another process too."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, LeaseExpired, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.rows.columns import Column
from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.protocol import Backend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.project import ROOT
from tests.support.queue_in_a_folder import Queue, journaled


class Died(BaseException):
    """In place of the end of the process."""


class Mortal:
    """Dies in the middle of the n-th step that reaches the disk; nothing reaches it afterwards. None: lives, and
    counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, death: int | None) -> None:
        self.steps = 0
        self._death = death
        self._write = os.writev
        monkeypatch.setattr(os, "writev", self._writev)
        for name in ("fsync", "fdatasync", "replace", "unlink", "truncate"):
            monkeypatch.setattr(os, name, self._mortal(getattr(os, name)))

    def _dies(self) -> bool:
        self.steps += 1
        return self._death is not None and self.steps > self._death

    def _mortal(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._dies():
                raise Died
            return call(*args, **kwargs)

        return step

    def _writev(self, file: int, pieces: list[Any]) -> int:
        if self._dies():
            if self._death is not None and self.steps == self._death + 1:
                whole = b"".join(pieces)
                self._write(file, [whole[: len(whole) // 2]])
            raise Died
        return self._write(file, pieces)


async def live(queue: Queue, described: list[Any]) -> None:
    """Calls and saves; what is told after each call that was answered."""

    async def create(name: str, start: int) -> None:
        await queue.service.create_partition(name, range(start, start + 4), 2)

    calls: list[Callable[[], Any]] = [
        lambda: create("a", 0),
        lambda: queue.put([0, 1, 2]),
        lambda: queue.get("train"),
        lambda: queue.save(),
        lambda: queue.get("score", 4),
        lambda: create("b", 10),
        lambda: queue.put([3]),
        lambda: queue.service.acknowledge(0),
        lambda: queue.put([12, 10], "b"),
        lambda: queue.save(),
        lambda: queue.service.clear("a"),
        lambda: queue.get("train"),
    ]
    for call in calls:
        answer = call()
        if asyncio.iscoroutine(answer):
            await answer
        described.append(queue.described())


async def test_whenever_it_dies_what_was_answered_can_be_loaded(tmp_path: Path) -> None:
    described: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        mortal = Mortal(patch, None)
        with journaled(tmp_path / "whole") as queue:
            empty = queue.described()
            await live(queue, described)
    assert mortal.steps > 40
    states = [empty, *described]
    for death in range(mortal.steps):
        folder, answered = tmp_path / str(death), list[Any]()
        queue_that_dies: Queue | None = None
        with pytest.MonkeyPatch.context() as patch, suppress(Died):
            Mortal(patch, death)
            queue_that_dies = Queue.journaled(folder)
            await live(queue_that_dies, answered)
        if queue_that_dies is not None:
            queue_that_dies.end()  # as its process would
        assert Queue.loaded(folder).described() in states[len(answered) : len(answered) + 2], death
        with journaled(folder) as resumed:
            await resumed.service.create_partition("c", range(20, 21))
            goes_on = resumed.described()
        assert Queue.loaded(folder).described() == goes_on


async def test_a_write_that_fails_fails_the_call_and_all_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with journaled(tmp_path) as queue:
        await queue.service.create_partition("a", range(4))
        queue.put([0])
        described = queue.described()
        write = os.writev

        def full(file: int, pieces: list[Any]) -> int:
            write(file, [pieces[0][:7]])
            raise OSError(errno.ENOSPC, "no space")

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            with pytest.raises(OSError, match="no space"):
                queue.put([1])
        for call in (lambda: queue.put([2]), lambda: queue.get("train"), lambda: queue.service.close()):
            with pytest.raises(OSError, match="journal-0.log takes no more, for a write failed: .* no space"):
                call()
        with pytest.raises(OSError, match="takes no more"):
            await queue.save()
    assert Queue.loaded(tmp_path).described() == described


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.support.queue_in_a_folder import Queue

async def main():
    queue = Queue.journaled(Path(sys.argv[1]))
    await queue.service.create_partition("a", range(100_000))
    for i in range(100_000):
        queue.put([i])
        if i % 2:
            lease, rows = queue.get("train")
            if i % 4 == 1:
                queue.service.acknowledge(lease)
            print(i, flush=True)
        if i % 16 == 15:
            await queue.save()

asyncio.run(main())
"""


def kill_amid_answers(folder: Path) -> int:
    """The last number that the process told."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    with process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(60)]
        process.kill()
        lines += process.stdout.readlines()
    return max(int(line) for line in lines if line.endswith(b"\n"))


async def test_what_a_killed_process_had_answered_goes_on(tmp_path: Path) -> None:
    answered = kill_amid_answers(tmp_path)
    loaded = Queue.loaded(tmp_path)
    done = loaded.described()["partitions"]["a"]
    handed = (answered + 1) // 2
    assert done["written"]["reward"] in range(answered + 1, answered + 4)
    assert done["tasks"]["train"]["handed_out"] in (2 * handed, 2 * handed + 2)
    assert done["tasks"]["train"]["done"] in (2 * ((handed + 1) // 2), 2 * ((handed + 1) // 2) + 2)
    assert loaded.get("score", 4) == (done["tasks"]["train"]["handed_out"] // 2, [0, 1, 2, 3])


SPEC = QueueSpec(
    {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float64")},
    {"score": TaskSpec(("reward",)), "train": TaskSpec(("tokens", "reward"), lease_s=600.0)},
)
LENGTH = 4096
BACKENDS = pytest.mark.parametrize("backend", [ShmBackend(), InlineBackend()], ids=["shm", "inline"])


def cells(rows: list[int]) -> dict[str, Column]:
    """More than travels in a message, where there is another way."""
    return {
        "tokens": Ragged.from_rows([np.full(LENGTH, row) for row in rows], np.int64),
        "reward": np.array(rows, np.float64),
    }


def get(queue: SyncQueue, task: str, consumer: str = "x") -> tuple[int, list[int]]:
    batch = queue.get(task, 2, consumer=consumer, timeout_s=60)
    assert batch is not None
    assert batch.dense("reward").tolist() == batch.rows.tolist()
    if task == "train":
        assert np.array_equal(batch.ragged("tokens").values, np.repeat(batch.rows, LENGTH))
    return batch.lease, batch.rows.tolist()


def fill(queue: SyncQueue) -> None:
    queue.create_partition("a", range(8))
    queue.put("a", [1, 0, 2], cells([1, 0, 2]))
    queue.put("a", [3], {"reward": np.array([3.0])})


def go_on(queue: SyncQueue) -> None:
    """After `fill`, and rows 0 and 1 were handed out to both tasks under leases 0 and 1."""
    queue.acknowledge(1)
    with pytest.raises(ValueError, match="column 'reward' of row 3 .* is already written"):
        queue.put("a", [3], {"reward": np.array([3.0])})
    queue.put("a", [3], {"tokens": cells([3])["tokens"]})
    assert get(queue, "score") == (2, [2, 3])
    lease, rows = get(queue, "train")
    assert (lease, rows) == (3, [2, 3])
    queue.release("x")
    with pytest.raises(LeaseExpired):
        queue.acknowledge(3)
    assert get(queue, "train") == (4, [2, 3])
    queue.clear_finished()


@BACKENDS
def test_what_a_killed_queue_had_answered_goes_on_in_another_process(tmp_path: Path, backend: Backend) -> None:
    with QueueProcess.start(SPEC, backend, journal=str(tmp_path)) as first, first.sync() as queue:
        fill(queue)
        assert (get(queue, "score"), get(queue, "train", "y")) == ((0, [0, 1]), (1, [0, 1]))
        queue.describe()  # what this client said to have received has arrived
        first.process.kill()
        first.process.wait()
        with pytest.raises(ConnectionError):
            queue.describe()
    with QueueProcess.start(SPEC, backend, journal=str(tmp_path)) as second, second.sync() as queue:
        go_on(queue)
        queue.acknowledge(4)
        described = queue.describe()["partitions"]
        queue.save()
        assert len(list(tmp_path.iterdir())) == 3
    with QueueProcess.start(SPEC, backend, journal=str(tmp_path)) as third, third.sync() as queue:
        assert queue.describe()["partitions"] == described


@BACKENDS
def test_a_queue_is_saved_while_in_use_and_resumed_more_than_once(tmp_path: Path, backend: Backend) -> None:
    folder = str(tmp_path / "checkpoint")
    with QueueProcess.start(SPEC, backend, saves=str(tmp_path)) as first, first.sync() as queue:
        fill(queue)
        with pytest.raises(ValueError, match="journals in no folder"):
            queue.save()
        assert (get(queue, "score"), get(queue, "train", "y")) == ((0, [0, 1]), (1, [0, 1]))
        queue.save(folder)
        queue.clear_finished()
    for _ in range(2):
        with QueueProcess.start(SPEC, backend, resume=folder) as again, again.sync() as queue:
            go_on(queue)


def test_what_the_process_of_a_queue_logs_says_of_which_run_and_role_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with QueueProcess.start(SPEC, journal=str(tmp_path)) as first, first.sync() as queue:
        fill(queue)
    journal = tmp_path / "journal-0.log"
    os.truncate(journal, journal.stat().st_size - 1)
    with QueueProcess.start(SPEC, journal=str(tmp_path), run="bench/a_cell/seed=0"):
        pass
    (line,) = capfd.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["run"], told["role"], told["level"]) == ("bench/a_cell/seed=0", "queue", "warning")
    assert "the process that wrote it died" in told["message"]


def test_a_queue_cannot_resume_and_journal_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both: a journal resumes by itself"):
        QueueProcess.start(SPEC, resume=str(tmp_path), journal=str(tmp_path))
