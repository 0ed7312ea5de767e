"""The queue against a model in plain Python: any order of calls, exactly-once hand-out, whole groups.

The model knows sets and lists, looks at every row on every request, and has no incremental state to get wrong. Readers
stay pending over many steps; leases are numbered in hand-out order, so the model replays
what several of them were given.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from harness.runtime.virtual_runtime import VirtualLoop
from harness.transfer_queue import Batch, ColumnSpec, LeaseExpired, LocalQueue, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.control.spec import First
from tests.support.examples import examples

T = TypeVar("T")
COLUMNS = {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float32"), "old": ColumnSpec("int32")}
TASKS = {
    "fifo": TaskSpec(("tokens",)),
    "leased": TaskSpec(("tokens", "old"), lease_s=3),
    "ready": TaskSpec(("reward",), policy="ready", lease_s=2),
    "groups": TaskSpec(("tokens", "reward"), whole_groups=True),
    "completion": TaskSpec(("tokens", "old"), policy="completion", whole_groups=True),
    "completion_rows": TaskSpec(("reward",), policy="completion", lease_s=3),
    "ready_groups": TaskSpec(("old", "reward"), policy="ready", whole_groups=True, lease_s=4),
    "ranks": TaskSpec(("tokens", "reward"), ranks=2, whole_groups=True, lease_s=3),
}
ONE_RANK = sorted(task for task, spec in TASKS.items() if spec.ranks == 1)
CONSUMERS = ("x", "y")
Unit = tuple[int, ...]


def tokens_of(row: int) -> np.ndarray:
    return np.arange(row % 4, dtype=np.int64) + row


def column(name: str, rows: list[int]) -> Ragged | np.ndarray:
    if name == "tokens":
        return Ragged.from_rows([tokens_of(row) for row in rows], np.int64)
    return np.array(rows, COLUMNS[name].dtype)


@dataclass(frozen=True)
class Get:
    task: str
    count: int
    minimum: int
    consumer: str
    rank: int
    partition: str | None
    first: First | None = None  # (other, ((below, by), ...)), counted from the start


@dataclass
class ModelLease:
    task: str
    rank: int
    consumer: str
    partition: str
    units: list[Unit]
    due: float | None
    formed: int


@dataclass
class Model:
    groups: dict[str, list[Unit]] = field(default_factory=dict)
    written: set[tuple[int, str]] = field(default_factory=set)
    taken: dict[str, set[int]] = field(default_factory=lambda: {task: set() for task in TASKS})
    done: dict[str, set[int]] = field(default_factory=lambda: {task: set() for task in TASKS})
    handed: Counter[str] = field(default_factory=Counter)  # rows, less those put back
    dropped: dict[str, set[int]] = field(default_factory=lambda: {task: set() for task in TASKS})
    started: dict[str, dict[int, int]] = field(default_factory=lambda: {task: {} for task in TASKS})  # row: bound
    became_ready: dict[tuple[str, Unit], int] = field(default_factory=dict)  # by which put
    puts: int = 0
    shares: list[tuple[int, int, str, list[Unit]]] = field(default_factory=list)  # (formed, rank, partition, units)
    leases: dict[int, ModelLease] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    cleared: set[str] = field(default_factory=set)
    bounds: dict[tuple[str, str], int] = field(default_factory=dict)
    closed: bool = False
    formed: int = 0

    def units(self, task: str, partition: str) -> list[Unit]:
        groups = self.groups[partition]
        return groups if TASKS[task].whole_groups else [(row,) for group in groups for row in group]

    def ready(self, task: str, unit: Unit) -> bool:
        return all((row, name) in self.written for row in unit for name in TASKS[task].columns)

    def put(self, rows: list[int], names: set[str]) -> None:
        self.written |= {(row, name) for row in rows for name in names}
        self.puts += 1
        for task in TASKS:
            for unit in [unit for partition in self.groups for unit in self.units(task, partition)]:
                if self.ready(task, unit):
                    self.became_ready.setdefault((task, unit), self.puts)

    def left(self, task: str, partition: str) -> list[Unit]:
        gone = self.taken[task] | self.dropped[task]
        return [unit for unit in self.units(task, partition) if unit[0] not in gone]

    def started_under(self, task: str, partition: str, other: str, below: int) -> list[Unit]:
        """What `task` has left of what `other` was handed under such a bound."""
        rows = {row for row, bound in self.started[other].items() if bound <= below}
        return [unit for unit in self.left(task, partition) if rows & set(unit)]

    def available(self, get: Get, left: list[Unit], strict: bool) -> list[Unit]:
        below = self.bounds.get((get.task, get.consumer), 10**9)
        if strict:
            left = list(takewhile(lambda unit: self.ready(get.task, unit), left))
        left = [unit for unit in left if self.ready(get.task, unit) and max(unit) < below]
        if TASKS[get.task].policy == "completion":
            left.sort(key=lambda unit: self.became_ready[get.task, unit])
        return left

    def form(self, get: Get) -> tuple[str, list[Unit]] | None:
        ranks = TASKS[get.task].ranks
        asked = [name for name in self.groups if get.partition in (None, name)]
        left = {name: self.left(get.task, name) for name in asked}
        due, room = self.due(get)
        strict = TASKS[get.task].policy == "fifo" and not due
        left = {name: due.get(name, []) for name in asked} if due else left
        available = {name: self.available(get, units, strict) for name, units in left.items()}
        if TASKS[get.task].policy == "completion":
            asked.sort(key=lambda n: [self.became_ready[get.task, unit] for unit in available[n][:1]] or [10**9])
        for partition in asked:
            if not left[partition]:
                continue
            rows = len(left[partition][0])
            most = min(get.count, room) // rows * ranks
            least = min(-(-get.minimum // rows) * ranks, len(left[partition]), most)
            if len(available[partition]) >= least:
                return partition, available[partition][:most]
            if strict:
                return None
        return None

    def slack(self, get: Get) -> dict[int, int]:
        """By bound, how many rows may go before all that was started under it, where there is any."""
        slack: dict[int, int] = {}
        asked = [name for name in self.groups if get.partition in (None, name)]
        for below, by in get.first[1] if get.first else ():
            rows = [
                row
                for name in asked
                for unit in self.started_under(get.task, name, get.first[0], below)
                for row in unit
            ]
            if rows:
                slack[below] = min(slack.get(below, 10**9), by - self.handed[get.task] - len(rows))
        return slack

    def due(self, get: Get) -> tuple[dict[str, list[Unit]], int]:
        """What goes alone, by partition, and how many rows at most."""
        asked = [name for name in self.groups if get.partition in (None, name)]
        unit = max((len(unit) for name in asked for unit in self.left(get.task, name)), default=1)
        slack = self.slack(get)
        pressing = min((below for below, rows in slack.items() if rows < unit), default=None)
        room = min((rows for below, rows in slack.items() if pressing is None or below < pressing), default=10**9)
        if pressing is None:
            return {}, room
        started = {name: self.started_under(get.task, name, get.first[0], pressing) for name in asked}
        return {name: units for name, units in started.items() if units}, room

    def request(self, get: Get) -> tuple[str, list[Unit], int] | str:
        """(partition, units, number of the formed micro-batch), and they are taken; or "wait", or "closed"."""
        mine = self.my_shares(get)
        if not mine and (formed := self.form(get)) is not None:
            partition, units = formed
            self.taken[get.task] |= {row for unit in units for row in unit}
            if TASKS[get.task].ranks == 1:
                return partition, units, 0
            half = (len(units) + 1) // 2
            self.shares += [(self.formed, 0, partition, units[:half]), (self.formed, 1, partition, units[half:])]
            self.formed += 1
            mine = self.my_shares(get)
        if mine:
            number, _, partition, units = mine[0]
            if any(row >= self.bounds.get((get.task, get.consumer), 10**9) for unit in units for row in unit):
                return "wait"  # formed by a consumer with a wider bound
            self.shares.remove(mine[0])
            return partition, units, number
        return "closed" if self.exhausted(get) else "wait"

    def my_shares(self, get: Get) -> list[tuple[int, int, str, list[Unit]]]:
        if TASKS[get.task].ranks == 1:
            return []
        return sorted(s for s in self.shares if s[1] == get.rank and get.partition in (None, s[2]))

    def exhausted(self, get: Get) -> bool:
        if get.partition in self.cleared:
            return True
        if get.partition not in self.groups and not self.closed:
            return False
        over = self.finished(get.task)
        asked = self.groups if get.partition is None else [p for p in self.groups if p == get.partition]
        return all(row in over for p in asked for group in self.groups[p] for row in group)

    def finished(self, task: str) -> set[int]:
        return self.dropped[task] | (self.taken if TASKS[task].lease_s is None else self.done)[task]

    def over(self, partition: str) -> bool:
        rows = {row for group in self.groups[partition] for row in group}
        written = all((row, name) in self.written for row in rows for name in COLUMNS)
        to_collect = any(share[2] == partition for share in self.shares)
        return written and not to_collect and all(rows <= self.finished(task) for task in TASKS)

    def clear(self, partition: str) -> None:
        del self.groups[partition]
        self.cleared.add(partition)
        self.shares = [share for share in self.shares if share[2] != partition]
        self.leases = {n: lease for n, lease in self.leases.items() if lease.partition != partition}

    def put_back(self, number: int) -> None:
        lease = self.leases.pop(number)
        self.handed[lease.task] -= sum(map(len, lease.units))
        for row in [row for unit in lease.units for row in unit]:
            self.started[lease.task].pop(row, None)
        if TASKS[lease.task].ranks > 1:
            self.shares.append((lease.formed, lease.rank, lease.partition, lease.units))
        else:
            self.taken[lease.task] -= {row for unit in lease.units for row in unit}

    def lose(self, numbers: list[int]) -> None:
        for number in numbers:
            self.put_back(number)
            self.lost.add(number)

    def expire(self, now: float) -> None:
        self.lose([n for n, lease in self.leases.items() if lease.due is not None and lease.due <= now + 1e-3])


class QueueAgainstModel(RuleBasedStateMachine):
    """Mostly puts and gets, several a step: what goes wrong is drawn inside one rule, or hardly anything would be
    handed out before everything is cleared."""

    handed_out: Counter[str] = Counter()

    @initialize(sizes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2])), min_size=1, max_size=2))
    def start(self, sizes: list[tuple[int, int]]) -> None:
        self.loop = VirtualLoop()
        self.queue = LocalQueue(QueueSpec(COLUMNS, TASKS))
        self.model = Model()
        self.pending: dict[Get, asyncio.Task[Batch | None]] = {}
        self.created = 0
        for groups, group_size in sizes:
            self.create(groups, group_size)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for task in self.pending.values():
                task.cancel()
            self.run(asyncio.sleep(0))
            self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def settle(self) -> None:
        """Let readers run, then make the model agree with all that they got and did not get."""
        for _ in range(4):
            self.run(asyncio.sleep(0))
        answered = {get: task.result() for get, task in self.pending.items() if task.done()}
        self.pending = {get: task for get, task in self.pending.items() if get not in answered}
        batches = [(get, batch) for get, batch in answered.items() if batch is not None]
        for get, batch in sorted(batches, key=lambda got: got[1].lease):
            self.check(get, batch)
        for get in [get for get, batch in answered.items() if batch is None]:
            assert self.model.request(get) == "closed"
        for get in self.pending:
            assert self.model.request(get) == "wait", f"{get} was left waiting"

    def check(self, get: Get, batch: Batch) -> None:
        alone, room = self.model.due(get)
        slack = self.model.slack(get)
        expected = self.model.request(get)
        assert not isinstance(expected, str), f"{get} got {batch}, the model says {expected}"
        partition, units, formed = expected
        rows = [row for unit in units for row in unit]
        assert (batch.partition, batch.rows.tolist()) == (partition, rows)
        for name in TASKS[get.task].columns:
            if name == "tokens":
                assert [r.tolist() for r in batch.ragged(name).rows()] == [tokens_of(row).tolist() for row in rows]
            else:
                assert batch.dense(name).tolist() == rows
        self.handed_out[get.task] += 1
        self.model.handed[get.task] += len(rows)
        for below, rest in self.model.slack(get).items():
            assert rest >= min(slack[below], 0), f"{get} got {rows}: too late for what was started under {below}"
        lease_s = TASKS[get.task].lease_s
        due = None if lease_s is None else self.loop.time() + lease_s
        assert batch.lease not in self.model.leases
        bound = self.model.bounds.get((get.task, get.consumer))
        if bound is not None:
            self.model.started[get.task] |= dict.fromkeys(rows, bound)
        self.handed_out["first"] += bool(alone)
        self.handed_out["room"] += not alone and room <= get.count
        self.model.leases[batch.lease] = ModelLease(get.task, get.rank, get.consumer, partition, units, due, formed)

    def create(self, groups: int, group_size: int) -> str:
        name, first = f"train_{self.created}", 100 * self.created
        self.created += 1
        rows = list(range(first, first + groups * group_size))
        self.run(self.queue.create_partition(name, rows, group_size))
        self.model.groups[name] = [tuple(rows[i : i + group_size]) for i in range(0, len(rows), group_size)]
        self.settle()
        return name

    @precondition(lambda self: not self.model.closed and len(self.model.groups) < 3)
    @rule(groups=st.integers(1, 4), group_size=st.sampled_from([1, 2]))
    def create_another(self, groups: int, group_size: int) -> None:
        self.create(groups, group_size)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), puts=st.lists(st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1), min_size=1, max_size=4))
    def put_some_rows(self, data: st.DataObject, puts: list[set[str]]) -> None:
        rows = data.draw(st.permutations(self.rows_of(self.draw_partition(data))))
        for names in puts:
            self.put(rows[: data.draw(st.integers(1, 3))], names)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), names=st.permutations(sorted(COLUMNS)), gets=st.integers(0, 3))
    def put_and_get(self, data: st.DataObject, names: list[str], gets: int) -> None:
        partition = self.draw_partition(data)
        for name in names:
            self.put(self.rows_of(partition), {name})
            for _ in range(gets):
                self.get_one(data)

    def put(self, rows: list[int], names: set[str]) -> None:
        rows = [row for row in rows if not any((row, name) in self.model.written for name in names)]
        if rows:
            self.run(self.queue.put(f"train_{rows[0] // 100}", rows, {name: column(name, rows) for name in names}))
            self.model.put(rows, names)
            self.settle()

    def draw_partition(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.model.groups)))

    def rows_of(self, partition: str) -> list[int]:
        return [row for group in self.model.groups[partition] for row in group]

    @precondition(lambda self: self.model.written)
    @rule(data=st.data())
    def put_a_cell_twice(self, data: st.DataObject) -> None:
        row, name = data.draw(st.sampled_from(sorted(self.model.written)))
        with pytest.raises(ValueError, match="already written|cleared"):
            self.run(self.queue.put(f"train_{row // 100}", [row], {name: column(name, [row])}))
        self.settle()

    @rule(data=st.data(), gets=st.integers(1, 4))
    def get_some(self, data: st.DataObject, gets: int) -> None:
        for _ in range(gets):
            self.get_one(data)

    def get_one(self, data: st.DataObject) -> None:
        task, consumer = data.draw(st.sampled_from(sorted(TASKS))), data.draw(st.sampled_from(CONSUMERS))
        rank = data.draw(st.integers(0, TASKS[task].ranks - 1))
        count = 4 if TASKS[task].ranks > 1 else data.draw(st.sampled_from([2, 4]))  # ranks ask for the same count
        named = st.sampled_from([f"train_{i}" for i in range(self.created + 1)])
        wants = data.draw(st.none() | st.sampled_from(sorted(TASKS))) if TASKS[task].ranks == 1 else None
        first = None if wants is None else self.draw_first(data, task, wants)
        self.get(
            Get(task, count, data.draw(st.integers(1, count)), consumer, rank, data.draw(st.none() | named), first)
        )

    def draw_first(self, data: st.DataObject, task: str, other: str) -> First:
        """Bounds under which `other` holds rows, and rows within which these are due, with little to spare."""
        self.run(self.queue.describe())  # what ran out goes to those who wait, before handed rows are counted
        self.model.expire(self.loop.time())
        self.settle()
        open_rows = {row for name in self.model.groups for unit in self.model.left(task, name) for row in unit}
        bounds = sorted({bound for row, bound in self.model.started[other].items() if row in open_rows}) or [50]
        pairs = []
        for below, spare in data.draw(
            st.lists(st.tuples(st.sampled_from(bounds), st.integers(-1, 4)), min_size=1, max_size=3)
        ):
            started = [self.model.started_under(task, name, other, below) for name in self.model.groups]
            rows = sum(len(unit) for units in started for unit in units)
            pairs.append((below, self.model.handed[task] + rows + spare))
        return other, tuple(sorted(pairs))

    def starts(self) -> st.SearchStrategy[tuple[str, int]]:
        """A task, and a bound under which it may have been handed rows."""
        return st.sampled_from(
            sorted((task, below) for (task, _), below in self.model.bounds.items()) or [("fifo", 50)]
        )

    def get(self, get: Get) -> None:
        if get not in self.pending:
            first = get.first
            if first is not None:
                handed = self.model.handed[get.task]
                first = (first[0], tuple((below, by - handed) for below, by in first[1]))
            call = self.queue.get(
                get.task,
                get.count,
                consumer=get.consumer,
                rank=get.rank,
                minimum=get.minimum,
                partition=get.partition,
                first=first,
            )
            self.pending[get] = self.loop.create_task(call)
            self.model.expire(self.loop.time())
            self.settle()

    @precondition(lambda self: self.model.leases or self.model.lost)
    @rule(data=st.data(), back=st.booleans())
    def end_lease(self, data: st.DataObject, back: bool) -> None:
        self.model.expire(self.loop.time())
        self.end(data.draw(st.sampled_from(sorted(self.model.leases | dict.fromkeys(self.model.lost)))), back)

    def end(self, number: int, back: bool) -> None:
        if back:
            self.run(self.queue.give_back(number))
            if number in self.model.leases:
                self.model.put_back(number)
        elif number in self.model.lost:
            with pytest.raises(LeaseExpired):
                self.run(self.queue.acknowledge(number))
        else:
            self.run(self.queue.acknowledge(number))
            lease = self.model.leases.pop(number)
            self.model.done[lease.task] |= {row for unit in lease.units for row in unit}
        self.settle()

    @rule(data=st.data(), what=st.sampled_from(["cancel", "bound", "bound", "die", "clear", "close"]))
    def something_happens(self, data: st.DataObject, what: str) -> None:
        if what == "cancel" and self.pending:
            self.pending.pop(data.draw(st.sampled_from(list(self.pending)))).cancel()
        elif what == "bound":
            self.bound(data.draw(st.sampled_from(sorted(TASKS))), data.draw(st.integers(0, 100 * self.created + 8)))
        elif what == "die":
            self.die(data.draw(st.sampled_from(CONSUMERS)))
        elif what == "clear" and self.model.groups:
            self.clear(self.draw_partition(data))
        elif what == "close" and self.created >= 3:
            self.run(self.queue.close())
            self.model.closed = True
        self.settle()

    def bound(self, task: str, below: int) -> None:
        below = below if below % 100 < 9 else below // 100 * 100 + below % 9  # among the ids that there are
        self.run(self.queue.set_bound(task, "y", below))
        self.model.bounds[task, "y"] = below

    def die(self, consumer: str) -> None:
        self.run(self.queue.release(consumer))
        self.model.lose([n for n, lease in self.model.leases.items() if lease.consumer == consumer])
        for get in [get for get in self.pending if get.consumer == consumer]:
            with pytest.raises(LeaseExpired):
                self.run(self.wait(self.pending.pop(get)))

    @staticmethod
    async def wait(task: asyncio.Task[T]) -> T:
        return await task

    def clear(self, partition: str) -> None:
        self.model.expire(self.loop.time())
        leases = {n: lease for n, lease in self.model.leases.items() if lease.partition == partition}
        if any(lease.due is not None for lease in leases.values()):
            with pytest.raises(ValueError, match="cannot be cleared"):
                self.run(self.queue.clear(partition))
            return
        self.run(self.queue.clear(partition))
        self.model.clear(partition)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), other=st.sampled_from(sorted(TASKS)), task=st.sampled_from(sorted(TASKS)), drop=st.booleans())
    def start_some(self, data: st.DataObject, other: str, task: str, drop: bool) -> None:
        """`other` is handed rows under one bound and another, and `task` wants some of them first, or not at all."""
        partition = self.draw_partition(data)
        for name in TASKS[other].columns:
            self.put(self.rows_of(partition)[: data.draw(st.integers(1, 8))], {name})
        below = data.draw(st.sampled_from(self.rows_of(partition))) + 1
        for bound in (below, below + data.draw(st.integers(0, 4))):
            self.run(self.queue.set_bound(other, "y", bound))
            self.model.bounds[other, "y"] = bound
            self.settle()
            self.get(Get(other, 4, 1, "y", 0, data.draw(st.sampled_from([None, partition]))))
        if drop:
            return self.drop(task, other, below)
        if TASKS[task].ranks == 1:
            named = data.draw(st.sampled_from([None, partition]))
            for name in data.draw(st.permutations(sorted(COLUMNS))):
                first = self.draw_first(data, task, other)
                self.get(Get(task, 4, data.draw(st.integers(1, 4)), "x", 0, named, first))
                self.put(self.rows_of(partition)[data.draw(st.integers(0, 1)) :: 2], {name})

    @precondition(lambda self: not self.model.closed and len(self.model.groups) < 4)
    @rule(data=st.data(), other=st.sampled_from(ONE_RANK), task=st.sampled_from(ONE_RANK), group_size=st.integers(1, 2))
    def others_go_before_what_is_due(self, data: st.DataObject, other: str, task: str, group_size: int) -> None:
        """`other` is handed the first rows, two at a time; `task` can have later ones before these, and then all."""
        partition = self.create(8 // group_size, group_size)
        rows = self.rows_of(partition)
        self.put(rows[:6], set(TASKS[other].columns))
        for below in (rows[2], rows[4], rows[6])[: data.draw(st.integers(1, 3))]:
            self.bound(other, below)
            self.get(Get(other, 2, 2, "y", 0, partition))
        for start in (data.draw(st.integers(2, 6)), data.draw(st.integers(0, 4)), 0):
            for name in TASKS[task].columns:
                self.put([row for row in rows[start:] if (row, name) not in self.model.written], {name})
            for _ in range(data.draw(st.integers(1, 2))):
                minimum = data.draw(st.integers(1, 4))
                self.get(Get(task, 4, minimum, "x", 0, partition, self.draw_first(data, task, other)))

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), task=st.sampled_from(sorted(TASKS)))
    def drop_some(self, data: st.DataObject, task: str) -> None:
        self.drop(task, *data.draw(self.starts()))

    def drop(self, task: str, started: str, below: int) -> None:
        if TASKS[task].ranks > 1:
            with pytest.raises(ValueError, match="cannot drop rows"):
                self.run(self.queue.drop(task, started, below))
            return
        units = [u for name in self.model.groups for u in self.model.started_under(task, name, started, below)]
        rows = [row for unit in units for row in unit]
        assert self.run(self.queue.drop(task, started, below)) == rows
        self.model.dropped[task] |= set(rows)
        self.handed_out["dropped"] += len(rows)
        self.settle()

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def finish_a_partition(self, data: st.DataObject) -> None:
        partition = self.draw_partition(data)
        for name in COLUMNS:
            for row in self.rows_of(partition):
                self.put([row], {name})
        tasks = data.draw(st.sampled_from([list(TASKS), list(TASKS)[1:]]))
        for task, spec in [(task, TASKS[task]) for task in tasks for _ in self.rows_of(partition)]:
            for rank in range(spec.ranks):
                self.get(Get(task, 4, 1, "x", rank, partition))
        for number in list(self.model.leases):
            self.end(number, back=False)
        self.clear_finished()

    @rule()
    def clear_finished(self) -> None:
        self.model.expire(self.loop.time())
        over = [partition for partition in self.model.groups if self.model.over(partition)]
        assert self.run(self.queue.clear_finished()) == over
        for partition in over:
            self.model.clear(partition)
        self.handed_out["retired"] += len(over)
        self.settle()

    @rule()
    def a_second_passes(self) -> None:
        self.run(asyncio.sleep(1))
        self.model.expire(self.loop.time())
        self.settle()


def test_the_queue_behaves_as_its_model() -> None:
    QueueAgainstModel.handed_out.clear()
    cases = examples(100)
    run_state_machine_as_test(QueueAgainstModel, settings=settings(max_examples=cases, stateful_step_count=50))
    for task in [*TASKS, "first", "room", "dropped", "retired"]:  # or nothing was shown
        assert QueueAgainstModel.handed_out[task] > cases / 5, QueueAgainstModel.handed_out
