"""What a get asks of the controller, and what it is answered."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from harness.transfer_queue.spec import QueueSpec

First = tuple[str, tuple[tuple[int, int], ...]]
"""(other, ((below, rows), ...)): what task `other` was handed under bound `below` or less goes among so many rows."""


class Answer(Enum):
    WAIT = "not now"
    CLOSED = "nothing is left, and nothing will come"


@dataclass(frozen=True, slots=True)
class Ask:
    """What one `get` wants: `minimum` to `count` rows for each rank.

    first=(other, ((below, by), ...)), `below` ascending: what task `other` was handed under a bound of `below` or less
    is among the first `by` rows that this task is handed, counted from the queue's beginning.
    """

    task: str
    count: int
    minimum: int
    consumer: str
    rank: int
    partition: str | None
    first: First | None = None

    def check(self, spec: QueueSpec) -> None:
        """ValueError for what can never be served."""
        check_task(spec, self.task)
        task = spec.tasks[self.task]
        if not 0 <= self.rank < task.ranks:
            raise ValueError(f"rank {self.rank} of task {self.task!r} is outside its {task.ranks} ranks")
        if not 1 <= self.minimum <= self.count:
            raise ValueError(f"a get takes 1 <= minimum <= count, not minimum={self.minimum}, count={self.count}")
        if self.first is not None:
            check_task(spec, self.first[0])
            check_one_rank(spec, self.task, "get what comes first")


def check_task(spec: QueueSpec, task: str) -> None:
    """ValueError unless there is this task."""
    if task not in spec.tasks:
        raise ValueError(f"task {task!r} is unknown; there are {sorted(spec.tasks)}")


def check_one_rank(spec: QueueSpec, task: str, what: str) -> None:
    """ValueError where several readers of a task would have to agree on it."""
    if (ranks := spec.tasks[task].ranks) > 1:
        raise ValueError(f"task {task!r} has {ranks} ranks and cannot {what}: give it one")
