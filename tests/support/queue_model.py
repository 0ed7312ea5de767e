"""What a TransferQueue does, in plain Python: sets and lists, looked at whole on every request.

The one model that every implementation is held against (`queue_machine`). It has no incremental state to get wrong, and
nothing waits in it: a request is answered at once, with WAIT if need be. Times are the caller's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from harness.transfer_queue import GetRequest, QueueSpec, TaskSpec
from harness.transfer_queue.control.policies import SPLITS

WAIT, CLOSED = "wait", "closed"
FAR = 10**9
Unit = tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """One rank's part of the micro-batch of this number."""

    task: str
    rank: int
    number: int
    partition: str
    units: list[Unit]

    @property
    def rows(self) -> list[int]:
        return [row for unit in self.units for row in unit]


@dataclass(frozen=True)
class Held:
    """A share in a consumer's hands; due: when its lease runs out, None = never."""

    share: Share
    consumer: str
    due: float | None


@dataclass
class Model:
    """Row ids are different in all partitions; leases are numbered by the queue. Requests count their `first` from the
    queue's beginning. weigh: what a row weighs."""

    spec: QueueSpec
    weigh: Callable[[int], int]
    groups: dict[str, list[Unit]] = field(default_factory=dict)
    """By partition, in creation order."""
    written: set[tuple[int, str]] = field(default_factory=set)
    ready_since: dict[tuple[str, Unit], int] = field(default_factory=dict)
    """The number of the put that made a unit ready for a task."""
    taken: dict[str, set[int]] = field(default_factory=dict)
    done: dict[str, set[int]] = field(default_factory=dict)
    dropped: dict[str, set[int]] = field(default_factory=dict)
    started: dict[str, dict[int, int]] = field(default_factory=dict)
    """By task: under which bound each row is out, of those that are out under one."""
    dispatched: Counter[str] = field(default_factory=Counter)
    """Rows, less those put back."""
    shares: list[Share] = field(default_factory=list)
    """To be collected."""
    leases: dict[int, Held] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    orphans: set[int] = field(default_factory=set)
    """Open leases that were given before a restart, over connections that ended with it."""
    cleared: set[str] = field(default_factory=set)
    bounds: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    closed: bool = False
    puts: int = 0
    formed: int = 0

    def __post_init__(self) -> None:
        for task in self.spec.tasks:
            self.taken[task], self.done[task], self.dropped[task], self.started[task] = set(), set(), set(), {}

    # -- what there is

    def task(self, task: str) -> TaskSpec:
        return self.spec.tasks[task]

    def rows(self, partition: str) -> list[int]:
        return [row for group in self.groups[partition] for row in group]

    def units(self, task: str, partition: str) -> list[Unit]:
        return self.groups[partition] if self.task(task).whole_groups else [(row,) for row in self.rows(partition)]

    def left(self, task: str, partition: str) -> list[Unit]:
        gone = self.taken[task] | self.dropped[task]
        return [unit for unit in self.units(task, partition) if unit[0] not in gone]

    def ready(self, task: str, unit: Unit) -> bool:
        return all((row, name) in self.written for row in unit for name in self.task(task).columns)

    def finished(self, task: str) -> set[int]:
        return self.dropped[task] | (self.taken if self.task(task).lease_s is None else self.done)[task]

    def asked(self, partition: str | None) -> list[str]:
        return [name for name in self.groups if partition in (None, name)]

    # -- writing

    def create(self, name: str, rows: list[int], group_size: int) -> None:
        self.groups[name] = [tuple(rows[i : i + group_size]) for i in range(0, len(rows), group_size)]

    def put(self, rows: Iterable[int], columns: Iterable[str]) -> None:
        self.puts += 1
        self.written |= {(row, name) for row in rows for name in columns}
        for task in self.spec.tasks:
            for unit in [unit for partition in self.groups for unit in self.units(task, partition)]:
                if self.ready(task, unit):
                    self.ready_since.setdefault((task, unit), self.puts)

    # -- what goes first

    def started_under(self, task: str, partition: str, other: str, below: int) -> list[Unit]:
        """What `task` has left of what `other` was handed under such a bound."""
        rows = {row for row, bound in self.started[other].items() if bound <= below}
        return [unit for unit in self.left(task, partition) if rows & set(unit)]

    def slack(self, get: GetRequest) -> dict[int, int]:
        """By bound, how many rows may go before all that was started under it, where there is any."""
        slack: dict[int, int] = {}
        other, pairs = get.first or ("", ())
        for below, by in pairs:
            units = [u for name in self.asked(get.partition) for u in self.started_under(get.task, name, other, below)]
            if units:
                rows = by - self.dispatched[get.task] - sum(map(len, units))
                slack[below] = min(slack.get(below, FAR), rows)
        return slack

    def due(self, get: GetRequest) -> tuple[dict[str, list[Unit]], int]:
        """What goes alone, by partition, and how many rows at most."""
        asked, slack = self.asked(get.partition), self.slack(get)
        unit = max((len(unit) for name in asked for unit in self.left(get.task, name)), default=1)
        pressing = min((below for below, rows in slack.items() if rows < unit), default=None)
        most = min((rows for below, rows in slack.items() if pressing is None or below < pressing), default=FAR)
        if pressing is None or get.first is None:
            return {}, most
        started = {name: self.started_under(get.task, name, get.first[0], pressing) for name in asked}
        return {name: units for name, units in started.items() if units}, most

    # -- reading

    def request(self, get: GetRequest) -> Share | str:
        """What the get is answered: it is taken, but in no consumer's hands before `hand_over`."""
        mine = self._to_collect(get)
        if not mine:
            self._form(get)
            mine = self._to_collect(get)
        if not mine:
            return CLOSED if self._exhausted(get) else WAIT
        above, below = self.bounds.get((get.task, get.consumer), (0, FAR))
        if any(not above <= row < below for row in mine[0].rows):
            return WAIT  # formed by a consumer with a wider bound
        self.shares.remove(mine[0])
        return mine[0]

    def _to_collect(self, get: GetRequest) -> list[Share]:
        mine = [s for s in self.shares if (s.task, s.rank) == (get.task, get.rank)]
        return sorted((s for s in mine if get.partition in (None, s.partition)), key=lambda share: share.number)

    def _form(self, get: GetRequest) -> None:
        """A micro-batch of shares for all ranks, if there is one."""
        task, asked = self.task(get.task), self.asked(get.partition)
        due, most_rows = self.due(get)
        strict = task.policy == "fifo" and not due
        left = {name: due.get(name, []) if due else self.left(get.task, name) for name in asked}
        above, _ = self.bounds.get((get.task, get.consumer), (0, FAR))
        if above:
            left = {name: self._from(above, get.task, name, units) for name, units in left.items()}
        available = {name: self._available(get, name, units, strict) for name, units in left.items()}
        if task.policy == "completion":
            asked.sort(key=lambda n: [self.ready_since[get.task, unit] for unit in available[n][:1]] or [FAR])
        for name in asked:
            if not left[name]:
                continue
            rows = len(left[name][0])
            most = min(get.count, most_rows) // rows * task.ranks
            least = min(-(-get.least // rows) * task.ranks, len(left[name]), most)
            if len(available[name]) >= least:
                return self._cut(get.task, name, available[name][:most])
            if strict:
                return

    def _from(self, above: int, task: str, partition: str, left: list[Unit]) -> list[Unit]:
        before = set(takewhile(lambda unit: max(unit) < above, self.units(task, partition)))
        return [unit for unit in left if unit not in before]

    def _available(self, get: GetRequest, partition: str, left: list[Unit], strict: bool) -> list[Unit]:
        """In the order in which they go."""
        (above, below), policy = self.bounds.get((get.task, get.consumer), (0, FAR)), self.task(get.task).policy
        allowed = set(takewhile(lambda unit: max(unit) < below, self.units(get.task, partition)))
        if strict and not above:
            left = list(takewhile(lambda unit: self.ready(get.task, unit), left))
        left = [unit for unit in left if self.ready(get.task, unit) and unit in allowed]
        if policy == "completion":
            left.sort(key=lambda unit: self.ready_since[get.task, unit])
        if policy == "longest_first":
            left.sort(key=lambda unit: -sum(map(self.weigh, unit)))
        return left

    def _cut(self, task: str, partition: str, units: list[Unit]) -> None:
        spec, weights = self.task(task), np.array([sum(map(self.weigh, unit)) for unit in units], np.int64)
        before = sum(set(unit) <= self.taken[task] for unit in self.units(task, partition))
        parts = SPLITS[spec.split](np.arange(len(units)), spec.ranks, weights, before)  # has tests of its own
        for rank, part in enumerate(parts):
            self.shares.append(Share(task, rank, self.formed, partition, [units[i] for i in part]))
        self.taken[task] |= {row for unit in units for row in unit}
        self.formed += 1

    def _exhausted(self, get: GetRequest) -> bool:
        if get.partition in self.cleared:
            return True
        if get.partition not in self.groups and not self.closed:  # also if it is None
            return False
        finished = self.finished(get.task)
        return all(row in finished for name in self.asked(get.partition) for row in self.rows(name))

    def hand_over(self, lease: int, share: Share, consumer: str, now: float) -> None:
        lease_s, (_, bound) = self.task(share.task).lease_s, self.bounds.get((share.task, consumer), (0, None))
        self.leases[lease] = Held(share, consumer, None if lease_s is None else now + lease_s)
        self.dispatched[share.task] += len(share.rows)
        if bound is not None:
            self.started[share.task] |= dict.fromkeys(share.rows, bound)

    def drop(self, task: str, other: str, below: int) -> list[int]:
        rows = [row for name in self.groups for u in self.started_under(task, name, other, below) for row in u]
        self.dropped[task] |= set(rows)
        return rows

    # -- leases

    def acknowledge(self, lease: int) -> None:
        share = self.leases.pop(lease).share
        self.done[share.task] |= set(share.rows)

    def give_back(self, lease: int) -> None:
        share = self.leases.pop(lease).share
        self.dispatched[share.task] -= len(share.rows)
        for row in share.rows:
            self.started[share.task].pop(row, None)
        if self.task(share.task).ranks > 1:
            self.shares.append(share)
        else:
            self.taken[share.task] -= set(share.rows)

    def lose(self, leases: Iterable[int]) -> None:
        for lease in list(leases):
            self.give_back(lease)
            self.lost.add(lease)

    def release(self, consumer: str) -> None:
        """The consumer is said to be dead: all it did not acknowledge goes out again."""
        self.lose(lease for lease, held in self.leases.items() if held.consumer == consumer)

    def expire(self, now: float) -> None:
        self.lose(n for n, held in self.leases.items() if held.due is not None and held.due <= now + 1e-3)

    def held_by_connection(self, consumer: str) -> list[int]:
        """What goes out again when its connection ends: the rest was consumed when it was dispatched."""
        held = {n: h for n, h in self.leases.items() if h.due is not None and n not in self.orphans}
        return [lease for lease, h in held.items() if h.consumer == consumer]

    def restart(self) -> None:
        """The queue is saved and loaded: what is open stays open, until it is acknowledged or released."""
        self.orphans = set(self.leases)

    # -- the end of partitions

    def may_clear(self, partition: str) -> bool:
        return not any(held.share.partition == partition and held.due is not None for held in self.leases.values())

    def clear(self, partition: str) -> None:
        del self.groups[partition]
        self.cleared.add(partition)
        self.shares = [share for share in self.shares if share.partition != partition]
        self.leases = {lease: held for lease, held in self.leases.items() if held.share.partition != partition}

    def over(self) -> list[str]:
        """The partitions that all tasks are done with, whose columns are all written."""
        to_collect = {share.partition for share in self.shares}
        return [name for name in self.groups if name not in to_collect and self._over(name)]

    def _over(self, partition: str) -> bool:
        rows = set(self.rows(partition))
        read = {name for task in self.spec.tasks.values() for name in task.columns}
        written = all((row, name) in self.written for row in rows for name in read)
        return written and all(rows <= self.finished(task) for task in self.spec.tasks)

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
        rows, left = set(self.rows(partition)), self.left(task, partition)
        return {
            "ready": sum(len(unit) for unit in left if self.ready(task, unit)),
            "handed_out": len(rows & self.taken[task]),
            "done": len(rows & (self.finished(task) - self.dropped[task])),
            "dropped": len(rows & self.dropped[task]),
            "depth": sum(map(len, left)),
        }
