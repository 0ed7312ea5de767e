"""A hypothesis state machine over the public interface of any queue, held against `queue_model.Model`.

One call at a time, and none that waits: a get takes what is there or says that there is nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from harness.transfer_queue import Batch, Column, ColumnSpec, LeaseExpired, QueueClosed, QueueSpec, Ragged, TaskSpec
from tests.support.examples import examples
from tests.support.queue_model import CLOSED, WAIT, Held, Model

SPEC = QueueSpec(
    columns={
        "tokens": ColumnSpec("int64", ragged=True),
        "mask": ColumnSpec("uint8", ragged=True),
        "reward": ColumnSpec("float32"),
        "vector": ColumnSpec("float64", shape=(2, 3)),
    },
    tasks={
        "fifo": TaskSpec(("tokens",)),
        "ready": TaskSpec(("reward", "vector"), policy="ready"),
        "groups": TaskSpec(("tokens", "reward"), whole_groups=True),
        "completion": TaskSpec(("mask", "reward"), policy="completion", whole_groups=True, lease_s=3600),
        "leased": TaskSpec(("tokens", "mask"), lease_s=math.inf),
        "leased_groups": TaskSpec(tuple("tokens mask reward vector".split()), "ready", whole_groups=True, lease_s=3600),
    },
)
COLUMNS, TASKS, CONSUMERS = sorted(SPEC.columns), sorted(SPEC.tasks), ("x", "y")
LEASED = [task for task in TASKS if SPEC.tasks[task].lease_s is not None]
MOST = 60  # items of the longest row of a ragged column


class Side(Protocol):
    """A queue of SPEC, and two connections to it."""

    def call(self, consumer: str, verb: str, /, *arguments: Any, **options: Any) -> Any:
        """Call a verb of the TransferQueue protocol over this consumer's connection; return or raise what it does."""

    def die(self, consumer: str) -> bool:
        """End its connection without a word; the next call makes another. Whether connections can die here."""

    def restart(self) -> bool:
        """End the queue and load it into a new one, which `call` then speaks to. Whether that can be done."""

    def close(self) -> None: ...


def column(name: str, rows: list[int]) -> Column:
    """Its values tell the row that they belong to."""
    if name in ("tokens", "mask"):
        sizes = [row * 7 % MOST for row in rows]
        return Ragged.from_rows(
            [np.full(n, row % 251) for n, row in zip(sizes, rows, strict=True)], SPEC.columns[name].dtype
        )
    spec = SPEC.columns[name]
    return np.array([np.full(spec.shape, row) for row in rows], spec.dtype).reshape(len(rows), *spec.shape)


def same(column: Column, other: Column) -> bool:
    if isinstance(column, Ragged):
        assert isinstance(other, Ragged)
        return np.array_equal(column.lengths, other.lengths) and np.array_equal(column.values, other.values)
    return np.array_equal(column, other)


class QueueMachine(RuleBasedStateMachine):
    """Mostly puts and gets; things that go wrong are drawn inside one rule, or little would be handed out."""

    make: ClassVar[Callable[[], Side]]
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(sizes=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 2])), min_size=1, max_size=2))
    def start(self, sizes: list[tuple[int, int]]) -> None:
        self.side = type(self).make()
        self.model = Model(SPEC)
        self.created = 0
        for groups, group_size in sizes:
            self.create(groups, group_size)

    def teardown(self) -> None:
        if hasattr(self, "side"):
            self.side.close()

    def call(self, verb: str, /, *arguments: Any, by: str = "x", **options: Any) -> Any:
        return self.side.call(by, verb, *arguments, **options)

    def check(self) -> None:
        """The queue tells of itself what the model knows."""
        assert_told(self.call("describe"), self.model.describe())

    # -- partitions and rows

    @precondition(lambda self: not self.model.closed and len(self.model.groups) < 3)
    @rule(groups=st.integers(1, 6), group_size=st.sampled_from([1, 2]))
    def create(self, groups: int, group_size: int) -> None:
        name, first = f"train_{self.created}", 100 * self.created
        self.created += 1
        rows = list(range(first, first + groups * group_size))[::-1]  # any order of ids will do
        self.call("create_partition", name, rows, group_size)
        self.model.create(name, rows, group_size)

    @precondition(lambda self: self.model.groups)
    @rule(
        data=st.data(),
        writer=st.sampled_from(CONSUMERS),
        puts=st.lists(st.sets(st.sampled_from(COLUMNS), min_size=1), min_size=1, max_size=4),
    )
    def put(self, data: st.DataObject, writer: str, puts: list[set[str]]) -> None:
        partition = self.draw_partition(data)
        rows = data.draw(st.permutations(self.model.rows(partition)))
        for names in puts:
            start = data.draw(st.integers(0, len(rows) - 1))
            self.write(writer, partition, rows[start : start + data.draw(st.integers(1, 8))], names)

    def write(self, writer: str, partition: str, rows: list[int], names: set[str]) -> None:
        """Those of the rows that have none of these yet."""
        rows = [row for row in rows if not any((row, name) in self.model.written for name in names)]
        if rows:
            self.call("put", partition, rows, {name: column(name, rows) for name in sorted(names)}, by=writer)
            self.model.put(rows, names)

    @precondition(lambda self: self.model.written)
    @rule(data=st.data(), what=st.sampled_from(["again", "foreign", "twice", "dtype"]))
    def a_bad_put_changes_nothing(self, data: st.DataObject, what: str) -> None:
        partition = self.draw_partition(data)
        if partition is None:
            return
        row = data.draw(st.sampled_from(self.model.rows(partition)))
        name = data.draw(st.sampled_from(COLUMNS))
        if what == "again" and (row, name) not in self.model.written:
            return
        rows = {"foreign": [row, 99], "twice": [row, row]}.get(what, [row])
        columns = {name: column(name, rows)} if what != "dtype" else {"reward": np.zeros(1, np.int16)}
        with pytest.raises(ValueError, match="written|not in partition|twice|holds float32"):
            self.call("put", partition, rows, columns)
        self.check()

    def draw_partition(self, data: st.DataObject) -> Any:
        return data.draw(st.sampled_from(sorted(self.model.groups))) if self.model.groups else None

    # -- reading

    @rule(
        data=st.data(),
        task=st.sampled_from(TASKS),
        consumer=st.sampled_from(CONSUMERS),
        count=st.sampled_from([2, 4, 12]),
        named=st.booleans(),
        end=st.sampled_from(["acknowledge", "keep", "keep", "give_back"]),
    )
    def get(self, data: st.DataObject, task: str, consumer: str, count: int, named: bool, end: str) -> None:
        names = sorted(self.model.groups) + sorted(self.model.cleared)[:1]
        partition = data.draw(st.sampled_from(names)) if named and names else None
        lease = self.take(task, consumer, count, data.draw(st.integers(1, count)), partition)
        if lease is not None and end != "keep":
            self.end(lease, end, by=consumer)

    def take(self, task: str, consumer: str, count: int, minimum: int, partition: str | None) -> int | None:
        expected = self.model.get(task, count, minimum, partition)
        options = {"consumer": consumer, "minimum": minimum, "partition": partition, "timeout_s": 0}
        if expected == WAIT:
            with pytest.raises(TimeoutError, match=f"task '{task}' waits for {minimum} rows"):
                self.call("get", task, count, by=consumer, **options)
            return None
        batch = self.call("get", task, count, by=consumer, **options)
        if expected == CLOSED:
            assert batch is None
            return None
        assert batch is not None
        assert (batch.partition, batch.rows.tolist()) == expected
        assert batch.lease not in self.model.leases | dict.fromkeys(self.model.lost)
        self.check_batch(task, batch)
        self.model.hand_out(batch.lease, Held(task, consumer, batch.partition, batch.rows.tolist()))
        self.seen[task] += 1
        return batch.lease

    def check_batch(self, task: str, batch: Batch) -> None:
        assert sorted(batch.columns) == sorted(SPEC.tasks[task].columns)
        for name, values in batch.columns.items():
            assert same(values, column(name, batch.rows.tolist())), f"column {name!r} of rows {batch.rows}"
            (values.values if isinstance(values, Ragged) else values)[...] = 0  # the reader's own

    # -- leases

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), how=st.sampled_from(["acknowledge", "give_back"]), by=st.sampled_from(CONSUMERS))
    def end_one(self, data: st.DataObject, how: str, by: str) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.model.leases))), how, by)

    def end(self, lease: int, how: str, by: str) -> None:
        self.call(how, lease, by=by)
        getattr(self.model, how)(lease)

    @precondition(lambda self: self.model.lost)
    @rule(data=st.data())
    def a_late_acknowledgement_is_refused(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.model.lost)))
        with pytest.raises(LeaseExpired, match=f"lease {lease} is over"):
            self.call("acknowledge", lease)
        self.check()

    # -- what goes wrong, and the end

    @rule(data=st.data(), what=st.sampled_from(["release", "die", "clear", "close"]))
    def something_happens(self, data: st.DataObject, what: str) -> None:
        consumer = data.draw(st.sampled_from(CONSUMERS))
        if what == "release":
            self.call("release", consumer)
            self.model.release(consumer)
        elif what == "die":
            self.die(consumer)
        elif what == "clear" and self.model.groups:
            self.clear(self.draw_partition(data))
        elif what == "close" and self.created >= 4:
            self.close_queue()
        self.check()

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
            self.call("release", consumer)
            self.model.release(consumer)
        self.die(consumer)
        self.take(task, data.draw(st.sampled_from(CONSUMERS)), 12, 1, partition)

    def work(self, task: str, partition: str, writer: str, reader: str, count: int) -> None:
        """All that a task reads is written, and some of it is taken."""
        for name in SPEC.tasks[task].columns:
            self.write(writer, partition, self.model.rows(partition), {name})
        self.take(task, reader, count, 1, partition)

    @precondition(lambda self: self.model.groups)
    @rule(
        data=st.data(), task=st.sampled_from(TASKS), count=st.sampled_from([2, 4]), consumer=st.sampled_from(CONSUMERS)
    )
    def the_queue_restarts(self, data: st.DataObject, task: str, count: int, consumer: str) -> None:
        """With rows in somebody's hands, if there were any left to take."""
        partition = self.draw_partition(data)
        self.work(task, partition, consumer, consumer, count)
        if self.side.restart():
            self.seen["restarts"] += bool(self.model.leases)
            self.model.restart()
            self.check()

    def die(self, consumer: str) -> None:
        held = [lease for lease in self.model.leased() if self.model.holds(consumer, lease)]
        if self.side.die(consumer):
            self.seen["deaths"] += bool(held)
            self.model.die(consumer)
            self.wait_for_leases()

    def wait_for_leases(self) -> None:
        """The queue learns of a death by the end of a stream, which another connection's request can overtake."""
        for _ in range(1000):
            if self.call("describe", by="x")["open_leases"] == len(self.model.leases):
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
    @rule(data=st.data(), writer=st.sampled_from(CONSUMERS), leave=st.integers(0, 8))
    def finish_a_partition(self, data: st.DataObject, writer: str, leave: int) -> None:
        """All is written, and all is read but sometimes by one task."""
        partition = self.draw_partition(data)
        rows = self.model.rows(partition)
        for name in COLUMNS:
            self.write(writer, partition, rows, {name})
        for lease in sorted(self.model.leases):
            self.end(lease, "acknowledge", by="x")
        for i, task in enumerate(TASKS):
            while i != leave and self.model.left(task, partition):
                lease = self.take(task, "xy"[i % 2], 12, 1, partition)
                if lease is None:  # another partition's turn
                    break
                self.end(lease, "acknowledge", by="x")
        self.clear_finished()

    @rule()
    def clear_finished(self) -> None:
        for consumer in CONSUMERS:  # what they said to have received has arrived when a later question is answered
            self.call("describe", by=consumer)
        over = self.model.over()
        assert self.call("clear_finished") == over
        for partition in over:
            self.model.clear(partition)
        self.seen["finished"] += len(over)
        self.check()


def assert_told(told: Mapping[str, Any], known: Mapping[str, Any], at: str = "describe()") -> None:
    """What is known is told so; more may be told."""
    for key, value in known.items():
        if isinstance(value, Mapping):
            if key == "partitions":
                assert list(told[key]) == list(value), f"{at}[{key!r}]"
            assert_told(told[key], value, f"{at}[{key!r}]")
        else:
            assert told[key] == value, f"{at}[{key!r}] is {told[key]}, the model says {value}"


def run_machine(make: Callable[[], Side], cases: int, steps: int, least: Mapping[str, int]) -> None:
    """cases: examples of so many steps in CI; least: how often each thing must happen in them, or nothing was shown.

    Elsewhere fewer, in proportion.
    """
    tried = examples(cases, least=10)

    class Machine(QueueMachine):
        seen: ClassVar[Counter[str]] = Counter()

    Machine.make = staticmethod(make)  # type: ignore[method-assign,assignment]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=tried,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )
    short = {what: Machine.seen[what] for what, times in least.items() if Machine.seen[what] < times * tried / cases}
    assert not short, f"happened less often than asked for: {short}, of {dict(Machine.seen)}"
