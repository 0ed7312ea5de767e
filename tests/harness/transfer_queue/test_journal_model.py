"""Whatever was called on a queue, in whatever order: one that was loaded from files answers all that follows as the
queue itself does."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.transfer_queue.control.controller import Controller, QueueClosed
from harness.transfer_queue.control.leases import LeaseExpired
from harness.transfer_queue.control.spec import GetRequest, QueueSpec, Status, TaskSpec
from harness.transfer_queue.journal.calls import ReplayState
from harness.transfer_queue.journal.files import Folder
from harness.transfer_queue.journal.service import JournaledService, at_once, load, save
from harness.transfer_queue.rows.columns import ColumnSpec, Ragged
from harness.transfer_queue.rows.frames import BatchAssignment
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.storage.inline import LocalStorage
from tests.support.examples import examples

COLUMNS = {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float32"), "old": ColumnSpec("int32")}
TASKS = {
    "fifo": TaskSpec(("tokens",)),
    "leased": TaskSpec(("tokens", "old"), lease_s=3),
    "ready": TaskSpec(("reward",), policy="ready", lease_s=2),
    "groups": TaskSpec(("tokens", "reward"), whole_groups=True),
    "completion": TaskSpec(("tokens", "old"), policy="completion", whole_groups=True),
    "completion_rows": TaskSpec(("reward",), policy="completion", lease_s=3),
    "longest": TaskSpec(("tokens",), policy="longest_first", weight="tokens", lease_s=float("inf")),
    "ranks": TaskSpec(("tokens", "reward"), ranks=2, whole_groups=True, lease_s=3),
    "balanced": TaskSpec(("tokens",), ranks=2, weight="tokens", split="balanced", lease_s=4),
}
SPEC = QueueSpec(COLUMNS, TASKS, capacity_rows=24, capacity_bytes=1200)
NAMES = sorted(TASKS)
CONSUMERS = ("x", "y", "z")

Cell = tuple[int, str]
Step = tuple[str, int, int, int, int]
"""What to do, and numbers that say to what: taken modulo what there is."""

WHAT = Counter(
    create=3, put=14, get=14, received=4, acknowledge=5, give_back=2, release=1, lose=1, bound=3, drop=2, clear=1
) + Counter(clear_finished=1, wait=1, close=1, follow=5)
numbers = st.integers(0, 99)
steps = st.lists(st.tuples(st.sampled_from(sorted(WHAT.elements())), *[numbers] * 4), min_size=12, max_size=50)


class Clock:
    def __init__(self, time: float) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


class Driven:
    """A service, its storage and its clock; and which cells were written."""

    def __init__(self, service: QueueService, storage: LocalStorage, clock: Clock, written: set[Cell]) -> None:
        self.written = set(written)
        self.service = service
        self.storage = storage
        self.clock = clock

    async def do(self, step: Step) -> Any:
        """The answer as plain data, or the error as a text."""
        try:
            return await self._do(*step)
        except (ValueError, TimeoutError, LeaseExpired, QueueClosed) as error:
            return f"{type(error).__name__}: {error}"

    async def _do(self, what: str, a: int, b: int, c: int, d: int) -> Any:
        service = self.service
        partition, start = f"train_{a % 4}", 100 * (a % 4)
        rows = np.arange(start, start + 8)
        match what:
            case "create":
                return await service.create_partition(partition, rows[: 4 + b % 2 * 4], 1 + c % 2, timeout_s=0)
            case "put":
                some = np.roll(rows[: 4 + d % 2 * 4], b)[: 1 + c % 8]
                return self._put(partition, some, [name for i, name in enumerate(sorted(COLUMNS)) if d >> i & 1], b)
            case "get":
                return self._get(NAMES[b % len(NAMES)], CONSUMERS[c % 3], d, partition if a % 3 else None)
            case "follow":
                return self._get(NAMES[b % len(NAMES)], "x", d, None, (NAMES[c % len(NAMES)], ((100 * a, d % 5),)))
            case "bound":
                return service.set_bound(NAMES[b % len(NAMES)], CONSUMERS[c % 3], int(rows[d % 8]) + 1)
            case "drop":
                return service.drop(NAMES[b % len(NAMES)], NAMES[c % len(NAMES)], int(rows[d % 8]) + 1)
            case "wait":
                self.clock.time += 1 + a % 2
                return None
            case "lose":
                return service.lose([self._lease(a, b), self._lease(c, d)])
            case "release":
                return service.release(CONSUMERS[c % 3])
            case "clear":
                return service.clear(partition)
            case "clear_finished":
                return service.clear_finished()
            case "close":
                return service.close() if a > 80 else None
        return getattr(service, what)(self._lease(a, b))

    def _lease(self, a: int, b: int) -> int:
        """Mostly an open one."""
        held = [lease.number for lease in self.service.open_leases()]
        return held[a % len(held)] if held and b % 5 else b % 20

    def _put(self, partition: str, rows: np.ndarray, names: Sequence[str], b: int) -> Any:
        if b % 10:  # otherwise it may fail
            rows = np.array(
                [row for row in rows.tolist() if not any((row, name) in self.written for name in names)], int
            )
        done = self._try_put(partition, rows, names)
        if done:
            self.written |= {(row, name) for row in rows.tolist() for name in names}
        return done

    def _try_put(self, partition: str, rows: np.ndarray, names: Sequence[str]) -> bool:
        columns = {name: column(name, rows) for name in names}
        weights = SPEC.check_columns(rows.size, columns)
        return self.service.try_put(partition, rows, self.storage.write(partition, columns), weights)

    def _get(self, task: str, consumer: str, number: int, partition: str | None, first: Any = None) -> Any:
        ranks = TASKS[task].ranks
        count = 4 if ranks > 1 else 2 + 2 * (number % 2)
        first = first if ranks == 1 else None
        answer = self.service.try_get(
            GetRequest(
                task,
                count,
                minimum=1 + number % count,
                consumer=consumer,
                rank=number % ranks,
                partition=partition,
                first=first,
            )
        )
        return self.read(answer) if isinstance(answer, BatchAssignment) else answer

    def read(self, assignment: BatchAssignment) -> Any:
        columns = self.storage.read(assignment, COLUMNS)
        for name, values in columns.items():
            assert np.array_equal(flat(values), flat(column(name, assignment.rows)))
        return assignment.lease, assignment.partition, assignment.rows.tolist(), sorted(columns)

    def counts(self) -> Any:
        """Without times, which a journal knows less exactly."""
        told = dict(self.service.describe())
        del told["tasks"]
        return told

    def forget_what_nobody_can_confirm(self) -> None:
        """Whoever has not received, and lost, its lease is not waited for after a restart."""
        held = {lease.number for lease in self.service.open_leases()}
        with self.service.moment() as (state, _):
            waits = [lease for lease, _ in state["unconfirmed"]]
        for lease in waits:
            if lease not in held:
                self.service.received(lease)


def column(name: str, rows: np.ndarray) -> Ragged | np.ndarray:
    if name == "tokens":
        return Ragged.from_rows([np.arange(row % 4, dtype=np.int64) + row for row in rows.tolist()], np.int64)
    return rows.astype(COLUMNS[name].dtype)


def flat(values: Ragged | np.ndarray) -> np.ndarray:
    return np.concatenate([values.values, values.lengths]) if isinstance(values, Ragged) else values


def twin(start: Callable[[LocalStorage, Clock], QueueService], gap: float, written: set[Cell]) -> Driven:
    """One from files, whose clock says something else, and is as late as that of the queue itself."""
    storage, clock = LocalStorage(), Clock(5000.0)
    driven = Driven(start(storage, clock), storage, clock, written)
    clock.time += gap
    return driven


def journaled_gap(folder: Path, now: float) -> float:
    """What has passed since the last time on record."""
    books = ReplayState(SPEC, Controller(SPEC), None)
    books.read(Folder(folder))
    return now - books.now


@settings(max_examples=examples(45))
@given(before=steps, between=steps, after=steps, saves=st.sets(st.integers(0, 60), max_size=2))
def any_calls_have_the_same_answers(
    before: list[Step], between: list[Step], after: list[Step], saves: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as path:
        asyncio.run(compare(Path(path), before, between, after, saves))


async def compare(path: Path, before: list[Step], between: list[Step], after: list[Step], saves: set[int]) -> None:
    home, plain, copy = path / "home", path / "plain", path / "copy"
    storage, clock = LocalStorage(), Clock(70.0)
    service = JournaledService(SPEC, storage, home, clock)
    original = Driven(service, storage, clock, set())
    create: list[Step] = [("create", 0, 1, 1, 0), ("create", 1, 1, 0, 0)]
    for i, step in enumerate(create + before):
        if i in saves:
            await service.save(at_once)
        await original.do(step)

    original.forget_what_nobody_can_confirm()
    await save(service, plain, at_once)
    shutil.copytree(home, copy)
    gap = journaled_gap(copy, clock.time)
    saved = load_again(plain, 0, original.written)
    replayed = load_again(copy, gap, original.written)
    resumed = twin(lambda storage, now: JournaledService(SPEC, storage, copy, now, storage), gap, original.written)
    await same(between, [original, saved, replayed, resumed])

    for driven in (original, saved, replayed, resumed):
        driven.forget_what_nobody_can_confirm()
    again = []
    for driven, folder in ((original, home), (resumed, copy)):
        assert isinstance(driven.service, JournaledService)
        driven.service.end()
        again.append(load_again(folder, journaled_gap(folder, driven.clock.time), original.written))
    await same(after, [saved, replayed, *again])


def load_again(folder: Path, gap: float, written: set[Cell]) -> Driven:
    return twin(lambda storage, now: load(SPEC, storage, folder, now, storage), gap, written)


async def same(calls: list[Step], queues: list[Driven]) -> None:
    for step in calls:
        answer, *others = [await queue.do(step) for queue in queues]
        assert all(other == answer for other in others), (step, answer, others)
        seen[step[0]] += not isinstance(answer, Status | str)
        counts, *others = [queue.counts() for queue in queues]
        assert all(other == counts for other in others), (step, counts, others)


seen: Counter[str] = Counter()
"""Calls that were answered with something, after a load."""


def test_a_loaded_queue_goes_on_as_the_queue_itself() -> None:
    seen.clear()
    any_calls_have_the_same_answers()
    assert all(seen[what] for what in WHAT), seen  # or nothing was shown
