"""Micro-batches cut into shares, one for each data-parallel rank."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.transfer_queue.control.asks import Ask
from harness.transfer_queue.control.policies import Units
from harness.transfer_queue.spec import QueueSpec


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part of a micro-batch; numbered in the order they were formed. `count`: rows a rank asked for."""

    number: int
    partition: str
    units: Units
    count: int

    def state(self) -> tuple[Any, ...]:
        """What makes it again."""
        return self.number, self.partition, self.units, self.count


class Shares:
    """What was formed and each rank has still to collect, by task and rank."""

    def __init__(self, spec: QueueSpec) -> None:
        self._waiting: dict[str, list[list[Share]]] = {
            name: [[] for _ in range(task.ranks)] for name, task in spec.tasks.items()
        }
        self._to_collect = Counter[str]()  # by partition
        self._formed = 0

    def form(self, task: str, partition: str, parts: Sequence[Units], count: int) -> None:
        """A micro-batch: leave rank r the share parts[r]."""
        for part, waiting in zip(parts, self._waiting[task], strict=True):
            waiting.append(Share(self._formed, partition, part, count))
        self._to_collect[partition] += len(parts)
        self._formed += 1

    def next(self, ask: Ask) -> Share | None:
        """The oldest that this rank has to collect, of the partition if it names one; ValueError if it was formed
        for another count."""
        for share in self._waiting[ask.task][ask.rank]:
            if ask.partition in (None, share.partition):
                if share.count != ask.count:
                    raise ValueError(
                        f"rank {ask.rank} of task {ask.task!r} asks for {ask.count} rows where another rank asked for "
                        f"{share.count}: all readers must ask for the same"
                    )
                return share
        return None

    def collect(self, ask: Ask, share: Share) -> None:
        """This rank takes it."""
        self._waiting[ask.task][ask.rank].remove(share)
        self._to_collect[share.partition] -= 1

    def put_back(self, task: str, rank: int, share: Share) -> None:
        """This rank has to collect it again, in its old turn."""
        insort(self._waiting[task][rank], share, key=lambda waiting: waiting.number)
        self._to_collect[share.partition] += 1

    def state(self) -> dict[str, Any]:
        """As plain data and arrays, which are its own: to be encoded at once."""
        waiting = {task: [[share.state() for share in w] for w in ranks] for task, ranks in self._waiting.items()}
        return {"waiting": waiting, "formed": self._formed}

    def restore(self, state: dict[str, Any]) -> None:
        """New ones go on as those were."""
        self._formed = state["formed"]
        for task, ranks in state["waiting"].items():
            self._waiting[task] = [[Share(*share) for share in waiting] for waiting in ranks]
            self._to_collect.update(share.partition for waiting in self._waiting[task] for share in waiting)

    def any_of(self, partition: str) -> bool:
        """Whether a rank has to collect a share of it."""
        return self._to_collect[partition] > 0

    def forget(self, partition: str) -> None:
        """The partition was cleared."""
        if self._to_collect.pop(partition, 0):
            for waiting in [waiting for ranks in self._waiting.values() for waiting in ranks]:
                waiting[:] = [share for share in waiting if share.partition != partition]
