"""The queue against a model in plain Python: any order of calls, exactly-once hand-out, whole groups.

The model knows sets and lists, looks at every row on every request, and has no incremental state to get wrong. Readers
stay parked over many steps; leases are numbered in hand-out order, so the model replays
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
from test_transfer_queue_local import VirtualLoop

from harness.transfer_queue import Batch, ColumnSpec, LeaseExpired, LocalQueue, QueueSpec, Ragged, TaskSpec

T = TypeVar("T")
COLUMNS = {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float32"), "old": ColumnSpec("int32")}
TASKS = {
    "fifo": TaskSpec(("tokens",)),
    "leased": TaskSpec(("tokens", "old"), lease_s=3),
    "ready": TaskSpec(("reward",), policy="ready", lease_s=2),
    "groups": TaskSpec(("tokens", "reward"), whole_groups=True),
    "ready_groups": TaskSpec(("old", "reward"), policy="ready", whole_groups=True, lease_s=4),
    "ranks": TaskSpec(("tokens", "reward"), ranks=2, whole_groups=True, lease_s=3),
}
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

    def available(self, get: Get, left: list[Unit]) -> list[Unit]:
        below = self.bounds.get((get.task, get.consumer), 10**9)
        if TASKS[get.task].policy == "fifo":
            left = list(takewhile(lambda unit: self.ready(get.task, unit), left))
        return [unit for unit in left if self.ready(get.task, unit) and max(unit) < below]

    def form(self, get: Get) -> tuple[str, list[Unit]] | None:
        ranks = TASKS[get.task].ranks
        for partition in self.groups if get.partition is None else [get.partition]:
            units = self.units(get.task, partition) if partition in self.groups else []
            left = [unit for unit in units if unit[0] not in self.taken[get.task]]
            if not left:
                continue
            rows = len(left[0])
            least = min(-(-get.minimum // rows) * ranks, len(left))
            available = self.available(get, left)
            if len(available) >= least:
                return partition, available[: get.count // rows * ranks]
            if TASKS[get.task].policy == "fifo":
                return None
        return None

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
        over = self.taken if TASKS[get.task].lease_s is None else self.done
        asked = self.groups if get.partition is None else [p for p in self.groups if p == get.partition]
        return all(row in over[get.task] for p in asked for group in self.groups[p] for row in group)

    def put_back(self, number: int) -> None:
        lease = self.leases.pop(number)
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
        self.parked: dict[Get, asyncio.Task[Batch | None]] = {}
        self.created = 0
        for groups, group_size in sizes:
            self.create(groups, group_size)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for task in self.parked.values():
                task.cancel()
            self.run(asyncio.sleep(0))
            self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def settle(self) -> None:
        """Let readers run, then make the model agree with all that they got and did not get."""
        for _ in range(4):
            self.run(asyncio.sleep(0))
        answered = {get: task.result() for get, task in self.parked.items() if task.done()}
        self.parked = {get: task for get, task in self.parked.items() if get not in answered}
        batches = [(get, batch) for get, batch in answered.items() if batch is not None]
        for get, batch in sorted(batches, key=lambda got: got[1].lease):
            self.check(get, batch)
        for get in [get for get, batch in answered.items() if batch is None]:
            assert self.model.request(get) == "closed"
        for get in self.parked:
            assert self.model.request(get) == "wait", f"{get} was left waiting"

    def check(self, get: Get, batch: Batch) -> None:
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
        lease_s = TASKS[get.task].lease_s
        due = None if lease_s is None else self.loop.time() + lease_s
        assert batch.lease not in self.model.leases
        self.model.leases[batch.lease] = ModelLease(get.task, get.rank, get.consumer, partition, units, due, formed)

    def create(self, groups: int, group_size: int) -> None:
        name, first = f"train_{self.created}", 100 * self.created
        self.created += 1
        rows = list(range(first, first + groups * group_size))
        self.run(self.queue.create_partition(name, rows, group_size))
        self.model.groups[name] = [tuple(rows[i : i + group_size]) for i in range(0, len(rows), group_size)]
        self.settle()

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
            self.model.written |= {(row, name) for row in rows for name in names}
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
        self.get(Get(task, count, data.draw(st.integers(1, count)), consumer, rank, data.draw(st.none() | named)))

    def get(self, get: Get) -> None:
        if get not in self.parked:
            call = self.queue.get(
                get.task,
                get.count,
                consumer=get.consumer,
                rank=get.rank,
                minimum=get.minimum,
                partition=get.partition,
            )
            self.parked[get] = self.loop.create_task(call)
            self.model.expire(self.loop.time())
            self.settle()

    @precondition(lambda self: self.model.leases or self.model.lost)
    @rule(data=st.data(), back=st.booleans())
    def end_lease(self, data: st.DataObject, back: bool) -> None:
        self.model.expire(self.loop.time())
        number = data.draw(st.sampled_from(sorted(self.model.leases | dict.fromkeys(self.model.lost))))
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
        if what == "cancel" and self.parked:
            self.parked.pop(data.draw(st.sampled_from(list(self.parked)))).cancel()
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
        for get in [get for get in self.parked if get.consumer == consumer]:
            with pytest.raises(LeaseExpired):
                self.run(self.wait(self.parked.pop(get)))

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
        del self.model.groups[partition]
        self.model.cleared.add(partition)
        self.model.shares = [share for share in self.model.shares if share[2] != partition]
        self.model.leases = {n: lease for n, lease in self.model.leases.items() if n not in leases}

    @rule()
    def a_second_passes(self) -> None:
        self.run(asyncio.sleep(1))
        self.model.expire(self.loop.time())
        self.settle()


def test_the_queue_behaves_as_its_model() -> None:
    QueueAgainstModel.handed_out.clear()
    run_state_machine_as_test(
        QueueAgainstModel, settings=settings(max_examples=150, stateful_step_count=50, deadline=None)
    )
    for task in TASKS:  # or nothing was shown
        assert QueueAgainstModel.handed_out[task] > 50, QueueAgainstModel.handed_out
