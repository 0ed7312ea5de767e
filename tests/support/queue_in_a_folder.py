"""A queue in a folder, for tests: its service, its writer, and a time that is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from harness.transfer_queue import ColumnSpec, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.control.spec import GetRequest, Status
from harness.transfer_queue.journal.service import JournaledService, at_once, load
from harness.transfer_queue.rows.columns import Column
from harness.transfer_queue.rows.frames import BatchAssignment
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.storage.inline import LocalStorage

SPEC = QueueSpec(
    {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float32", shape=(2,))},
    {"score": TaskSpec(("tokens",)), "train": TaskSpec(("tokens", "reward"), lease_s=10)},
)


class Queue:
    """A service and its writer, at a time that is told."""

    def __init__(self, start: Callable[[LocalStorage, Callable[[], float]], QueueService]) -> None:
        self.storage = LocalStorage()
        self.time = 100.0
        self.service = start(self.storage, lambda: self.time)

    @classmethod
    def journaled(cls, folder: Path) -> Queue:
        return cls(lambda storage, now: JournaledService(SPEC, storage, folder, now, storage))

    @classmethod
    def loaded(cls, folder: Path, spec: QueueSpec = SPEC) -> Queue:
        return cls(lambda storage, now: load(spec, storage, folder, now, storage))

    def end(self) -> None:
        assert isinstance(self.service, JournaledService)
        self.service.end()

    async def save(self) -> None:
        assert isinstance(self.service, JournaledService)
        await self.service.save(at_once)

    def put(self, rows: list[int], name: str = "a") -> None:
        columns = cells(rows)
        frame = self.storage.write(name, columns)
        assert self.service.try_put(name, np.array(rows), frame, SPEC.check_columns(len(rows), columns))

    def get(self, task: str, count: int = 2, consumer: str = "x") -> tuple[int, list[int]] | Status:
        answer = self.service.try_get(GetRequest(task, count, minimum=1, consumer=consumer))
        if not isinstance(answer, BatchAssignment):
            return answer
        columns = self.storage.read(answer, SPEC.columns)
        for column, wanted in zip(columns.values(), cells(answer.rows.tolist()).values(), strict=False):
            assert np.array_equal(flat(column), flat(wanted))
        self.service.received(answer.lease)
        return answer.lease, answer.rows.tolist()

    def described(self) -> Any:
        return {name: value for name, value in self.service.describe().items() if name != "tasks"}


def cells(rows: list[int]) -> dict[str, Column]:
    return {
        "tokens": Ragged.from_rows([np.arange(row, row + row % 3) for row in rows], np.int64),
        "reward": np.array([[row, -row] for row in rows], np.float32),
    }


def flat(column: Column) -> np.ndarray:
    return np.concatenate([column.values, column.lengths]) if isinstance(column, Ragged) else column


@contextmanager
def journaled(folder: Path) -> Iterator[Queue]:
    queue = Queue.journaled(folder)
    try:
        yield queue
    finally:
        queue.end()
