"""What a TransferQueue does, in plain Python and one call at a time: sets and lists, looked at whole on every request.

For tests that hold any backend against it. Nobody waits in it: a request is answered at once, with WAIT if need be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from harness.transfer_queue import QueueSpec, TaskSpec

WAIT, CLOSED = "wait", "closed"
Unit = tuple[int, ...]
Status = tuple[str, list[int]] | Literal["wait", "closed"]
"""(partition, rows), or why there are none."""


@dataclass(frozen=True)
class Held:
    """Rows in a consumer's hands."""

    task: str
    consumer: str
    partition: str
    rows: list[int]


@dataclass
class Model:
    """Row ids are different in all partitions. Leases are numbered by whoever hands out, and do not run out."""

    spec: QueueSpec
    groups: dict[str, list[Unit]] = field(default_factory=dict)
    """By partition, in creation order."""
    written: set[tuple[int, str]] = field(default_factory=set)
    out: dict[str, dict[int, bool]] = field(default_factory=dict)
    """By task: the rows that were handed out; whether they were acknowledged."""
    ready_since: dict[tuple[str, Unit], int] = field(default_factory=dict)
    """The number of the put that made a unit ready for a task."""
    leases: dict[int, Held] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    orphans: set[int] = field(default_factory=set)
    """Open leases that were given before a restart, over connections that ended with it."""
    cleared: set[str] = field(default_factory=set)
    closed: bool = False
    puts: int = 0

    def __post_init__(self) -> None:
        self.out = {task: {} for task in self.spec.tasks}

    # -- what there is

    def task(self, task: str) -> TaskSpec:
        return self.spec.tasks[task]

    def rows(self, partition: str) -> list[int]:
        return [row for group in self.groups[partition] for row in group]

    def units(self, task: str, partition: str) -> list[Unit]:
        return self.groups[partition] if self.task(task).whole_groups else [(row,) for row in self.rows(partition)]

    def left(self, task: str, partition: str) -> list[Unit]:
        return [unit for unit in self.units(task, partition) if unit[0] not in self.out[task]]

    def is_ready(self, task: str, unit: Unit) -> bool:
        return all((row, name) in self.written for row in unit for name in self.task(task).columns)

    def is_finished(self, task: str, row: int) -> bool:
        return row in self.out[task] and (self.task(task).lease_s is None or self.out[task][row])

    # -- writing

    def create(self, name: str, rows: list[int], group_size: int) -> None:
        self.groups[name] = [tuple(rows[i : i + group_size]) for i in range(0, len(rows), group_size)]

    def put(self, rows: Iterable[int], columns: Iterable[str]) -> None:
        self.puts += 1
        self.written |= {(row, name) for row in rows for name in columns}
        for task in self.spec.tasks:
            for unit in [unit for partition in self.groups for unit in self.units(task, partition)]:
                if self.is_ready(task, unit):
                    self.ready_since.setdefault((task, unit), self.puts)

    # -- reading

    def get(self, task: str, count: int, minimum: int, partition: str | None) -> Status:
        """What a get is answered. Nothing is taken yet: see `hand_out`."""
        asked = [name for name in self.groups if partition in (None, name)]
        available = {name: self._available(task, name) for name in asked}
        if self.task(task).policy == "completion":
            asked.sort(key=lambda n: [self.ready_since[task, unit] for unit in available[n][:1]] or [10**9])
        for name in asked:
            left = self.left(task, name)
            if not left:
                continue
            size = len(left[0])
            if len(available[name]) >= min(-(-minimum // size), len(left)):
                return name, [row for unit in available[name][: count // size] for row in unit]
            if self.task(task).policy == "fifo":
                return WAIT
        return CLOSED if self._is_exhausted(task, partition) else WAIT

    def _available(self, task: str, partition: str) -> list[Unit]:
        """In the order in which they go."""
        left = self.left(task, partition)
        if self.task(task).policy == "fifo":
            return list(takewhile(lambda unit: self.is_ready(task, unit), left))
        ready = [unit for unit in left if self.is_ready(task, unit)]
        if self.task(task).policy == "completion":
            ready.sort(key=lambda unit: self.ready_since[task, unit])
        return ready

    def _is_exhausted(self, task: str, partition: str | None) -> bool:
        if partition in self.cleared:
            return True
        if partition not in self.groups and not self.closed:  # also if it is None
            return False
        asked = [name for name in self.groups if partition in (None, name)]
        return all(self.is_finished(task, row) for name in asked for row in self.rows(name))

    def hand_out(self, lease: int, held: Held) -> None:
        self.out[held.task] |= dict.fromkeys(held.rows, False)
        self.leases[lease] = held

    # -- leases

    def acknowledge(self, lease: int) -> None:
        held = self.leases.pop(lease)
        self.out[held.task] |= dict.fromkeys(held.rows, True)

    def give_back(self, lease: int) -> None:
        held = self.leases.pop(lease)
        for row in held.rows:
            del self.out[held.task][row]

    def release(self, consumer: str) -> None:
        """Somebody says that the consumer is dead: all it did not acknowledge goes out again."""
        self._lose(lease for lease, held in self.leases.items() if held.consumer == consumer)

    def die(self, consumer: str) -> None:
        """Its connection is gone: what it had was consumed when handed out, but where the task has leases."""
        self._lose(lease for lease in self.leased() if self.holds(consumer, lease))

    def holds(self, consumer: str, lease: int) -> bool:
        return self.leases[lease].consumer == consumer and lease not in self.orphans

    def restart(self) -> None:
        """The queue is saved and loaded: what is open stays open, until somebody acknowledges or releases it."""
        self.orphans = set(self.leases)

    def leased(self) -> list[int]:
        return [lease for lease, held in self.leases.items() if self.task(held.task).lease_s is not None]

    def _lose(self, leases: Iterable[int]) -> None:
        for lease in list(leases):
            self.give_back(lease)
            self.lost.add(lease)

    # -- the end of partitions

    def may_clear(self, partition: str) -> bool:
        return all(self.leases[lease].partition != partition for lease in self.leased())

    def clear(self, partition: str) -> None:
        del self.groups[partition]
        self.cleared.add(partition)
        self.leases = {lease: held for lease, held in self.leases.items() if held.partition != partition}

    def over(self) -> list[str]:
        """The partitions that all tasks are done with."""
        return [name for name in self.groups if all(self._is_over(task, name) for task in self.spec.tasks)]

    def _is_over(self, task: str, partition: str) -> bool:
        return all(self.is_finished(task, row) and self.is_ready(task, (row,)) for row in self.rows(partition))

    def describe(self) -> Mapping[str, Any]:
        """As much of the queue's `describe` as can be known from outside."""
        return {
            "closed": self.closed,
            "open_leases": len(self.leases),
            "live_rows": sum(len(self.rows(name)) for name in self.groups),
            "partitions": {name: self._describe_partition(name) for name in self.groups},
        }

    def _describe_partition(self, name: str) -> dict[str, Any]:
        rows = self.rows(name)
        return {
            "written": {column: sum((row, column) in self.written for row in rows) for column in self.spec.columns},
            "tasks": {task: self._describe_task(task, name) for task in self.spec.tasks},
        }

    def _describe_task(self, task: str, partition: str) -> dict[str, int]:
        rows, left = self.rows(partition), self.left(task, partition)
        return {
            "ready": sum(len(unit) for unit in left if self.is_ready(task, unit)),
            "handed_out": sum(row in self.out[task] for row in rows),
            "done": sum(self.is_finished(task, row) for row in rows),
            "depth": sum(map(len, left)),
        }
