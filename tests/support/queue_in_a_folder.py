"""A queue that is saved to a folder and loaded, for tests: its service, its writer, and a time that is told."""

from pathlib import Path
from typing import Any

import numpy as np

from harness.transfer_queue import ColumnSpec, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.control.spec import GetRequest, Status
from harness.transfer_queue.rows.columns import Column
from harness.transfer_queue.rows.frames import BatchAssignment
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.snapshots.snapshot import Work, at_once, load, save
from harness.transfer_queue.storage.inline import LocalStorage

SPEC = QueueSpec(
    {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float32", shape=(2,))},
    {"score": TaskSpec(("tokens",)), "train": TaskSpec(("tokens", "reward"), lease_s=10)},
)


class Queue:
    """A service and its writer, at a time that is told."""

    def __init__(self, folder: Path | None = None, spec: QueueSpec = SPEC) -> None:
        """folder: of one that was saved; new unless given."""
        self.storage = LocalStorage()
        self.time = 100.0
        if folder is None:
            self.service = QueueService(spec, self.storage, self._now)
        else:
            self.service = load(spec, self.storage, folder, self._now, self.storage)

    @classmethod
    async def of(cls, rows: range) -> "Queue":
        """With a partition "a" of these, all written."""
        queue = cls()
        await queue.service.create_partition("a", rows)
        queue.put([*rows])
        return queue

    def _now(self) -> float:
        return self.time

    async def save(self, folder: Path, work: Work = at_once) -> None:
        await save(self.service, folder, work)

    def put(self, rows: list[int], name: str = "a") -> None:
        columns = cells(rows)
        frame = self.storage.write(name, columns)
        self.service.put(name, np.array(rows), frame, SPEC.check_columns(len(rows), columns))

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
