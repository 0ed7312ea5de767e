"""A queue in a folder: what was answered is there, whoever dies when."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

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


async def live(queue: Queue, told: list[Any]) -> None:
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
        told.append(queue.told())


async def test_whenever_it_dies_what_was_answered_can_be_loaded(tmp_path: Path) -> None:
    told: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        mortal = Mortal(patch, None)
        with journaled(tmp_path / "whole") as queue:
            empty = queue.told()
            await live(queue, told)
    assert mortal.steps > 40
    states = [empty, *told]
    for death in range(mortal.steps):
        folder, answered = tmp_path / str(death), list[Any]()
        queue_that_dies: Queue | None = None
        with pytest.MonkeyPatch.context() as patch, suppress(Died):
            Mortal(patch, death)
            queue_that_dies = Queue.journaled(folder)
            await live(queue_that_dies, answered)
        if queue_that_dies is not None:
            queue_that_dies.end()  # as its process would
        assert Queue.loaded(folder).told() in states[len(answered) : len(answered) + 2], death
        with journaled(folder) as resumed:
            await resumed.service.create_partition("c", range(20, 21))
            goes_on = resumed.told()
        assert Queue.loaded(folder).told() == goes_on


async def test_a_write_that_fails_fails_the_call_and_all_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with journaled(tmp_path) as queue:
        await queue.service.create_partition("a", range(4))
        queue.put([0])
        told = queue.told()
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
    assert Queue.loaded(tmp_path).told() == told


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
    done = loaded.told()["partitions"]["a"]
    handed = (answered + 1) // 2
    assert done["written"]["reward"] in range(answered + 1, answered + 4)
    assert done["tasks"]["train"]["handed_out"] in (2 * handed, 2 * handed + 2)
    assert done["tasks"]["train"]["done"] in (2 * ((handed + 1) // 2), 2 * ((handed + 1) // 2) + 2)
    assert loaded.get("score", 4) == (done["tasks"]["train"]["handed_out"] // 2, [0, 1, 2, 3])
