"""A hypothesis state machine over the public interface of any queue, held against `queue_model.Model`.

Where the queue is in this event loop, gets stay pending over many steps and time passes; elsewhere a get takes what is
there or says that there is nothing.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from harness.transfer_queue import Batch, ColumnSpec, GetRequest, LeaseExpired, QueueClosed, QueueSpec, TaskSpec
from harness.transfer_queue.rows.columns import Column, Ragged
from tests.support.examples import examples
from tests.support.queue_model import CLOSED, WAIT, Model
from tests.support.queue_sides import LocalSide, Side

COLUMNS = {
    "tokens": ColumnSpec("int64", ragged=True),
    "mask": ColumnSpec("uint8", ragged=True),
    "reward": ColumnSpec("float32"),
    "vector": ColumnSpec("float64", shape=(2, 3)),
}
NAMES = sorted(COLUMNS)


def spec_of(seconds: float) -> QueueSpec:
    """Leases run out after twice to four times so long."""
    tasks = {
        "fifo": TaskSpec(("tokens",)),
        "leased": TaskSpec(("tokens", "mask"), lease_s=3 * seconds),
        "ready": TaskSpec(("reward", "vector"), policy="ready"),
        "groups": TaskSpec(("tokens", "reward"), whole_groups=True),
        "completion": TaskSpec(("mask", "reward"), policy="completion", whole_groups=True),
        "completion_rows": TaskSpec(("reward",), policy="completion", lease_s=3 * seconds),
        "ready_groups": TaskSpec(tuple(NAMES), policy="ready", whole_groups=True, lease_s=4 * seconds),
        "longest": TaskSpec(("tokens",), policy="longest_first", weight="tokens", lease_s=math.inf),
        "ranks": TaskSpec(("tokens", "reward"), ranks=2, whole_groups=True, lease_s=2 * seconds),
        "balanced": TaskSpec(("mask", "tokens"), policy="ready", ranks=2, weight="tokens", split="balanced"),
    }
    return QueueSpec(COLUMNS, tasks)


TIMED, UNTIMED = spec_of(1), spec_of(3600)
TASKS = sorted(TIMED.tasks)
LEASED = [task for task in TASKS if TIMED.tasks[task].lease_s is not None and TIMED.tasks[task].ranks == 1]
CONSUMERS = ("x", "y")
MOST = 60  # items of the longest row of a ragged column


def length(row: int) -> int:
    return row * 7 % MOST


def column(name: str, rows: list[int]) -> Column:
    """Its values tell the row that they belong to."""
    spec = COLUMNS[name]
    if spec.ragged:
        return Ragged.from_rows([np.full(length(row), row % 251) for row in rows], spec.dtype)
    return np.array([np.full(spec.shape, row) for row in rows], spec.dtype).reshape(len(rows), *spec.shape)


def same(column: Column, other: Column) -> bool:
    if isinstance(column, Ragged):
        assert isinstance(other, Ragged)
        return np.array_equal(column.lengths, other.lengths) and np.array_equal(column.values, other.values)
    return np.array_equal(column, other)  # type: ignore[arg-type]


class QueueMachine(RuleBasedStateMachine):
    """Mostly puts and gets, several a step: what goes wrong is drawn inside one rule, or hardly anything would be
    dispatched before everything is cleared."""

    make: ClassVar[Callable[[], Side]]
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(sizes=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 2])), min_size=1, max_size=2))
    def start(self, sizes: list[tuple[int, int]]) -> None:
        self.side = type(self).make()
        self.model = Model(self.side.spec, length)
        self.pending: dict[GetRequest, asyncio.Task[Batch | None]] = {}
        self.created = 0
        for groups, group_size in sizes:
            self.create(groups, group_size)

    def teardown(self) -> None:
        if hasattr(self, "side"):
            self.cancel_pending()
            self.side.close()

    def call(self, verb: str, /, *arguments: Any, by: str = "x", **options: Any) -> Any:
        return self.side.call(by, verb, *arguments, **options)

    def check(self) -> None:
        """The queue describes itself as the model does."""
        self.expire()
        assert_described(self.side.describe(), self.model.describe())

    def expire(self) -> None:
        self.model.expire(self.side.now())

    # -- partitions and rows

    def create(self, groups: int, group_size: int) -> str:
        name, first = f"train_{self.created}", 100 * self.created
        self.created += 1
        rows = list(range(first, first + groups * group_size))
        if self.created % 3 == 0:
            rows.reverse()  # any order of ids will do
        self.call("create_partition", name, rows, group_size)
        self.model.create(name, rows, group_size)
        self.settle()
        return name

    @precondition(lambda self: not self.model.closed and len(self.model.groups) < 3)
    @rule(groups=st.integers(1, 6), group_size=st.sampled_from([1, 2]))
    def create_another(self, groups: int, group_size: int) -> None:
        self.create(groups, group_size)

    @precondition(lambda self: self.model.groups)
    @rule(
        data=st.data(),
        writer=st.sampled_from(CONSUMERS),
        puts=st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=4),
    )
    def put_some_rows(self, data: st.DataObject, writer: str, puts: list[set[str]]) -> None:
        rows = data.draw(st.permutations(self.model.rows(self.draw_partition(data))))
        for names in puts:
            start = data.draw(st.integers(0, len(rows) - 1))
            self.put(rows[start : start + data.draw(st.integers(1, 8))], names, writer)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), names=st.permutations(NAMES), gets=st.integers(0, 3))
    def put_and_get(self, data: st.DataObject, names: list[str], gets: int) -> None:
        partition = self.draw_partition(data)
        for name in names:
            self.put(self.model.rows(partition), {name})
            for _ in range(gets):
                self.get_one(data)

    def put(self, rows: list[int], names: set[str], writer: str = "x") -> None:
        """Those of the rows that have none of these yet."""
        rows = [row for row in rows if not any((row, name) in self.model.written for name in names)]
        if rows:
            columns = {name: column(name, rows) for name in sorted(names)}
            self.call("put", f"train_{rows[0] // 100}", rows, columns, by=writer)
            self.model.put(rows, names)
            self.settle()

    @precondition(lambda self: self.model.written and self.model.groups)
    @rule(data=st.data(), what=st.sampled_from(["again", "foreign", "twice", "dtype"]))
    def a_bad_put_changes_nothing(self, data: st.DataObject, what: str) -> None:
        partition = self.draw_partition(data)
        row = data.draw(st.sampled_from(self.model.rows(partition)))
        name = data.draw(st.sampled_from(NAMES))
        if what == "again" and (row, name) not in self.model.written:
            return
        rows = {"foreign": [row, 99], "twice": [row, row]}.get(what, [row])
        columns = {name: column(name, rows)} if what != "dtype" else {"reward": np.zeros(1, np.int16)}
        with pytest.raises(ValueError, match="written|not in partition|twice|holds float32"):
            self.call("put", partition, rows, columns)
        self.check()

    def draw_partition(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model.groups)))

    # -- reading

    @rule(data=st.data(), gets=st.integers(1, 4))
    def get_some(self, data: st.DataObject, gets: int) -> None:
        for _ in range(gets):
            self.get_one(data)

    def get_one(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(TASKS))
        ranks = self.model.task(task).ranks
        count = 4 if ranks > 1 else data.draw(st.sampled_from([2, 4, 12]))  # ranks ask for the same count
        wants = data.draw(st.none() | st.sampled_from(TASKS)) if ranks == 1 else None
        get = GetRequest(
            task,
            count,
            minimum=data.draw(st.integers(1, count)),
            consumer=data.draw(st.sampled_from(CONSUMERS)),
            rank=data.draw(st.integers(0, ranks - 1)),
            partition=data.draw(self.partitions()),
            first=None if wants is None else self.draw_first(data, task, wants),
        )
        self.get(get)

    def partitions(self) -> st.SearchStrategy[str | None]:
        """That there are, were or will be, or none."""
        return st.none() | st.sampled_from([f"train_{i}" for i in range(self.created + 1)])

    def some_of(self, partition: str) -> st.SearchStrategy[str | None]:
        return st.sampled_from([None, partition])

    def draw_first(self, data: st.DataObject, task: str, other: str) -> Any:
        """Bounds under which `other` holds rows, and rows within which these are due, with little to spare."""
        self.call("describe")  # what ran out goes to the gets that wait, before dispatched rows are counted
        self.expire()
        self.settle()
        open_rows = {row for name in self.model.groups for unit in self.model.left(task, name) for row in unit}
        bounds = sorted({bound for row, bound in self.model.started[other].items() if row in open_rows}) or [50]
        pairs = []
        spares = st.lists(st.tuples(st.sampled_from(bounds), st.integers(-1, 4)), min_size=1, max_size=3)
        for below, spare in data.draw(spares):
            started = [self.model.started_under(task, name, other, below) for name in self.model.groups]
            rows = sum(len(unit) for units in started for unit in units)
            pairs.append((below, self.model.dispatched[task] + rows + spare))
        return other, tuple(sorted(pairs))

    def get(self, get: GetRequest) -> int | None:
        """`first` counts from the queue's beginning. The lease of what it got at once."""
        request = get
        if get.first is not None:
            other, pairs = get.first
            so_far = self.model.dispatched[get.task]
            request = replace(get, first=(other, tuple((below, by - so_far) for below, by in pairs)))
        if not isinstance(self.side, LocalSide):
            self.expire()
            return self.get_now(get, request)
        if get in self.pending:
            return None
        before = set(self.model.leases)
        self.pending[get] = self.side.begin("get_batch", request)
        self.expire()
        self.settle()
        return next((n for n in set(self.model.leases) - before if self.model.leases[n].share.task == get.task), None)

    def get_now(self, get: GetRequest, request: GetRequest) -> int | None:
        try:
            batch = self.call("get_batch", replace(request, timeout_s=0), by=get.consumer)
        except TimeoutError as error:
            assert f"task '{get.task}' waits for" in str(error)
            assert self.model.request(get) == WAIT, f"{get} got nothing"
            return None
        self.answered(get, batch)
        return None if batch is None else batch.lease

    def settle(self) -> None:
        """Let pending gets run, then make the model agree with all that they got and did not get."""
        if not self.pending or not isinstance(self.side, LocalSide):
            return
        self.side.run_until_idle()
        answered = {get: task.result() for get, task in self.pending.items() if task.done()}
        self.pending = {get: task for get, task in self.pending.items() if get not in answered}
        batches = [(get, batch) for get, batch in answered.items() if batch is not None]
        for get, batch in sorted(batches, key=lambda got: got[1].lease):  # as they were dispatched
            self.answered(get, batch)
        for get in [get for get, batch in answered.items() if batch is None]:
            self.answered(get, None)
        for get in self.pending:
            assert self.model.request(get) == WAIT, f"{get} was left waiting"

    def answered(self, get: GetRequest, batch: Batch | None) -> None:
        alone, most = self.model.due(get)
        slack = self.model.slack(get)
        expected = self.model.request(get)
        if batch is None:
            assert expected == CLOSED, f"{get} got None, the model says {expected}"
            return
        assert not isinstance(expected, str), f"{get} got {batch}, the model says {expected}"
        assert (batch.partition, batch.rows.tolist()) == (expected.partition, expected.rows)
        assert batch.lease not in self.model.leases | dict.fromkeys(self.model.lost)
        self.check_columns(get.task, batch)
        self.model.hand_over(batch.lease, expected, get.consumer, self.side.now())
        for below, rest in self.model.slack(get).items():
            assert rest >= min(slack[below], 0), f"{get}: too late for what was started under {below}"
        self.seen[get.task] += 1
        self.seen["first"] += bool(alone)
        self.seen["limited"] += not alone and most <= get.count

    def check_columns(self, task: str, batch: Batch) -> None:
        assert sorted(batch.columns) == sorted(self.model.task(task).columns)
        for name, values in batch.columns.items():
            assert same(values, column(name, batch.rows.tolist())), f"column {name!r} of rows {batch.rows}"
            (values.values if isinstance(values, Ragged) else values)[...] = 0  # the reader's own

    def cancel_pending(self) -> None:
        for task in self.pending.values():
            task.cancel()
        self.pending.clear()
        if isinstance(self.side, LocalSide):
            self.side.run_until_idle()

    # -- leases

    @precondition(lambda self: self.model.leases or self.model.lost)
    @rule(data=st.data(), how=st.sampled_from(["acknowledge", "give_back"]), by=st.sampled_from(CONSUMERS))
    def end_one(self, data: st.DataObject, how: str, by: str) -> None:
        self.expire()
        self.end(data.draw(st.sampled_from(sorted(self.model.leases | dict.fromkeys(self.model.lost)))), how, by)

    def end(self, lease: int, how: str = "acknowledge", by: str = "x") -> None:
        if lease in self.model.lost and how == "acknowledge":
            with pytest.raises(LeaseExpired, match=r"lease \d+ is over"):
                self.call(how, lease, by=by)
        else:
            self.call(how, lease, by=by)
            if lease in self.model.leases:
                getattr(self.model, how)(lease)
        self.settle()

    @precondition(lambda self: self.model.leases)
    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        if isinstance(self.side, LocalSide):
            lost = len(self.model.lost)
            for _ in range(seconds):  # what runs out is dispatched again before the next second
                self.side.sleep(1.0)
                self.expire()
                self.settle()
            self.seen["expired"] += len(self.model.lost) - lost

    # -- bounds and what goes first

    def bound(self, task: str, below: int, above: int = 0) -> None:
        self.call("set_bound", task, "y", below, above)
        self.model.bounds[task, "y"] = above, below
        self.settle()

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), other=st.sampled_from(TASKS), task=st.sampled_from(TASKS), drop=st.booleans())
    def start_some(self, data: st.DataObject, other: str, task: str, drop: bool) -> None:
        """`other` is handed rows under one bound and another, and `task` wants some of them first, or not at all."""
        partition = self.draw_partition(data)
        for name in self.model.task(other).columns:
            self.put(self.model.rows(partition)[: data.draw(st.integers(1, 8))], {name})
        below = data.draw(st.sampled_from(self.model.rows(partition))) + 1
        for bound in (below, below + data.draw(st.integers(0, 4))):
            self.bound(other, bound)
            named = data.draw(self.some_of(partition))
            self.get(GetRequest(other, 4, minimum=1, consumer="y", partition=named))
        if drop:
            self.drop(task, other, below)
        elif self.model.task(task).ranks == 1:
            named = data.draw(self.some_of(partition))
            for name in data.draw(st.permutations(NAMES)):
                first = self.draw_first(data, task, other)
                minimum = data.draw(st.integers(1, 4))
                self.get(GetRequest(task, 4, minimum=minimum, consumer="x", partition=named, first=first))
                self.put(self.model.rows(partition), {name})

    @precondition(lambda self: not self.model.closed and len(self.model.groups) < 4)
    @rule(data=st.data(), other=st.sampled_from(TASKS), task=st.sampled_from(TASKS), group_size=st.integers(1, 2))
    def others_go_before_what_is_due(self, data: st.DataObject, other: str, task: str, group_size: int) -> None:
        """`other` is handed the first rows, two at a time; `task` can have later ones before these, and then all."""
        if max(self.model.task(other).ranks, self.model.task(task).ranks) > 1:
            return
        partition = self.create(8 // group_size, group_size)
        rows = self.model.rows(partition)
        self.put(rows[:6], set(self.model.task(other).columns))
        for below in (rows[2], rows[4], rows[6])[: data.draw(st.integers(1, 3))]:
            self.bound(other, below)
            self.get(GetRequest(other, 2, consumer="y", partition=partition))
        for start in (data.draw(st.integers(2, 6)), data.draw(st.integers(0, 4)), 0):
            for name in self.model.task(task).columns:
                self.put([row for row in rows[start:] if (row, name) not in self.model.written], {name})
            for _ in range(data.draw(st.integers(1, 2))):
                minimum, first = data.draw(st.integers(1, 4)), self.draw_first(data, task, other)
                self.get(GetRequest(task, 4, minimum=minimum, consumer="x", partition=partition, first=first))

    def drop(self, task: str, started: str, below: int) -> None:
        if self.model.task(task).ranks > 1:
            with pytest.raises(ValueError, match="cannot drop rows"):
                self.call("drop", task, started, below)
            return
        rows = self.call("drop", task, started, below)
        assert sorted(rows) == sorted(self.model.drop(task, started, below))
        self.seen["dropped"] += len(rows)
        self.settle()

    # -- what goes wrong, and the end

    @rule(
        data=st.data(), what=st.sampled_from(["cancel", "bound", "bound", "drop", "release", "die", "clear", "close"])
    )
    def something_happens(self, data: st.DataObject, what: str) -> None:
        self.expire()
        consumer, task = data.draw(st.sampled_from(CONSUMERS)), data.draw(st.sampled_from(TASKS))
        if what == "cancel" and self.pending:
            self.pending.pop(data.draw(st.sampled_from(list(self.pending)))).cancel()
        elif what == "bound":
            below = data.draw(st.integers(0, 100 * self.created + 8))
            above = data.draw(st.sampled_from([0, 0, 0, 103, 204]))
            self.bound(task, below if below % 100 < 9 else below // 100 * 100 + below % 9, above)  # among ids of rows
        elif what == "drop":
            bounded = sorted((other, below) for (other, _), (_, below) in self.model.bounds.items()) or [("fifo", 50)]
            self.drop(task, *data.draw(st.sampled_from(bounded)))
        elif what == "release":
            self.release(consumer)
        elif what == "die":
            self.die(consumer)
        elif what == "clear" and self.model.groups:
            self.clear(self.draw_partition(data))
        elif what == "close" and self.created >= 4:
            self.close_queue()
        self.settle()
        self.check()

    def release(self, consumer: str) -> None:
        self.call("release", consumer)
        self.model.release(consumer)
        for get in [get for get in self.pending if get.consumer == consumer]:
            assert isinstance(self.side, LocalSide)
            with pytest.raises(LeaseExpired):
                self.side.wait_for(self.pending.pop(get))
        self.settle()

    @precondition(lambda self: self.model.groups)
    @rule(
        data=st.data(),
        task=st.sampled_from(LEASED),
        consumer=st.sampled_from(CONSUMERS),
        writes=st.booleans(),
        released=st.booleans(),
    )
    def die_at_work(self, data: st.DataObject, task: str, consumer: str, writes: bool, released: bool) -> None:
        """A consumer ends with rows in hand, some of which it may have written itself."""
        partition = self.draw_partition(data)
        writer = consumer if writes else data.draw(st.sampled_from(CONSUMERS))
        self.work(task, partition, writer, consumer, data.draw(st.sampled_from([2, 4])))
        if released:
            self.release(consumer)
        self.die(consumer)
        reader = data.draw(st.sampled_from(CONSUMERS))
        self.get(GetRequest(task, 12, minimum=1, consumer=reader, partition=partition))

    def work(self, task: str, partition: str, writer: str, reader: str, count: int) -> None:
        """All that a task reads is written, and some of it is taken."""
        for name in self.model.task(task).columns:
            self.put(self.model.rows(partition), {name}, writer)
        self.get(GetRequest(task, count, minimum=1, consumer=reader, partition=partition))

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), task=st.sampled_from(TASKS), consumer=st.sampled_from(CONSUMERS))
    def the_queue_restarts(self, data: st.DataObject, task: str, consumer: str) -> None:
        """With rows in a consumer's hands, if there were any left to take."""
        if not self.side.restarts:
            return
        self.work(task, self.draw_partition(data), consumer, consumer, 4)
        self.cancel_pending()
        self.side.restart()
        self.seen["restarts"] += bool(self.model.leases)
        self.model.restart()
        self.check()

    def die(self, consumer: str) -> None:
        held = self.model.held_by_connection(consumer)
        if self.side.die(consumer):
            self.seen["deaths"] += bool(held)
            self.model.lose(held)
            self.wait_for_leases()

    def wait_for_leases(self) -> None:
        """The queue learns of a death by the end of a stream, which another connection's request can overtake."""
        for _ in range(1000):
            if self.side.describe()["open_leases"] == len(self.model.leases):
                return
        raise AssertionError("the queue did not notice that a consumer's connection ended")

    def clear(self, partition: str) -> None:
        if self.model.may_clear(partition):
            self.call("clear", partition)
            self.model.clear(partition)
        else:
            with pytest.raises(ValueError, match=f"partition '{partition}' cannot be cleared: consumer"):
                self.call("clear", partition)

    def close_queue(self) -> None:
        self.call("close")
        self.model.closed = True
        with pytest.raises(QueueClosed):
            self.call("create_partition", "late", [1])

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), writer=st.sampled_from(CONSUMERS), leave=st.integers(0, 12))
    def finish_a_partition(self, data: st.DataObject, writer: str, leave: int) -> None:
        """All is written, and all is read but sometimes by one task."""
        partition = self.draw_partition(data)
        rows = self.model.rows(partition)
        for name in NAMES:
            self.put(rows, {name}, writer)
        for task in [task for i, task in enumerate(TASKS) if i != leave]:
            self.read_all(task, partition, len(rows))
        for lease in sorted(self.model.leases):
            self.end(lease)
        self.clear_finished()

    def read_all(self, task: str, partition: str, most: int) -> None:
        ranks = self.model.task(task).ranks
        count = 4 if ranks > 1 else 12
        for _ in range(most):
            to_collect = any((share.task, share.partition) == (task, partition) for share in self.model.shares)
            if not self.model.left(task, partition) and not to_collect:
                return
            for rank in range(ranks):
                self.get(GetRequest(task, count, minimum=1, consumer="x", rank=rank, partition=partition))

    @rule()
    def clear_finished(self) -> None:
        for consumer in CONSUMERS:  # what they said to have received has arrived when a later question is answered
            self.call("describe", by=consumer)
        self.expire()
        over = self.model.over()
        assert sorted(self.call("clear_finished")) == sorted(over)
        for partition in over:
            self.model.clear(partition)
        self.seen["finished"] += len(over)
        self.settle()
        self.check()


def assert_described(described: Mapping[str, Any], known: Mapping[str, Any], at: str = "describe()") -> None:
    """All that the model knows is described so; more may be."""
    for key, value in known.items():
        if isinstance(value, Mapping):
            if key == "partitions":
                assert sorted(described[key]) == sorted(value), f"{at}[{key!r}]"
            assert_described(described[key], value, f"{at}[{key!r}]")
        else:
            assert described[key] == value, f"{at}[{key!r}] is {described[key]}, the model says {value}"


def run_machine(make: Callable[[], Side], cases: int, steps: int, least: Mapping[str, int]) -> None:
    """cases: examples of so many steps, where other tests have 150; least: how often each thing must happen in them, or
    nothing was shown. Elsewhere fewer, in proportion.
    """
    tried = examples(cases, least=10)

    class Machine(QueueMachine):
        seen: ClassVar[Counter[str]] = Counter()

    Machine.make = staticmethod(make)  # type: ignore[method-assign,assignment]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(max_examples=tried, stateful_step_count=steps, suppress_health_check=list(HealthCheck)),
    )
    short = {what: Machine.seen[what] for what, times in least.items() if Machine.seen[what] < times * tried / cases}
    assert not short, f"happened less often than asked for: {short}, of {dict(Machine.seen)}"
