"""The queue inside one event loop: the controller, a storage, and the readers that wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.transfer_queue.columns import Batch, Column, Rows, as_integers
from harness.transfer_queue.controller import Answer, Ask, Controller, Grant, QueueClosed
from harness.transfer_queue.leases import LeaseExpired
from harness.transfer_queue.queue import Portal, T
from harness.transfer_queue.spec import QueueSpec
from harness.transfer_queue.storage import LocalStorage, Storage

_TICK_S = 1e-6  # a timer may ring a rounding error before the lease is due


@dataclass(slots=True, eq=False)
class _Parked:
    ask: Ask
    answer: asyncio.Future[Grant | Answer]


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class LocalQueue:
    """A TransferQueue in one event loop; other threads reach it through `portal`.

    It has no loop of its own. A get that cannot be served is parked, and is answered by the very call that makes it
    servable (a put, a bound, a clear, another reader taking the rest, ...) or by the timer of the lease that runs out.
    now: the clock of leases, in seconds; the event loop's unless given.
    """

    def __init__(self, spec: QueueSpec, storage: Storage | None = None, now: Callable[[], float] = _loop_time) -> None:
        self.spec = spec
        self._controller = Controller(spec)
        self._storage = LocalStorage() if storage is None else storage
        self._now = now
        self._parked: dict[str, list[_Parked]] = {task: [] for task in spec.tasks}
        self._creating: deque[tuple[asyncio.Future[None], str, Rows, int]] = deque()
        self._busy: dict[str, int] = {}  # reads and writes under way, by partition
        self._idle: dict[str, asyncio.Future[None]] = {}  # clears that wait for them
        self._alarm: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- partitions

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        ids = self._controller.check_new(name, rows, group_size)
        if not self._creating and self._controller.has_room(ids.size):
            return self._controller.create(name, ids, group_size)
        created: asyncio.Future[None] = self._loop.create_future()
        turn = (created, name, ids, group_size)
        self._creating.append(turn)
        why = f"no room for the {ids.size} rows of partition {name!r} in {timeout_s} s"
        with _deadline(created, timeout_s, lambda: f"{why}: {self._controller.slowest_task()}"):
            try:
                await created
            finally:
                if turn in self._creating:
                    self._creating.remove(turn)
                self._create_waiting()  # whoever stood behind one that gave up

    def _create_waiting(self) -> None:
        while self._creating and self._controller.has_room(self._creating[0][2].size):
            created, name, ids, group_size = self._creating.popleft()
            if created.done():
                continue
            try:
                self._controller.create(name, ids, group_size)
                created.set_result(None)
            except (ValueError, QueueClosed) as error:  # its name was taken, or the queue closed, while it waited
                created.set_exception(error)

    async def clear(self, partition: str) -> None:
        self._expire()
        self._serve(self._controller.clear(partition))
        if self._busy.get(partition):
            self._idle[partition] = asyncio.get_running_loop().create_future()
            await self._idle[partition]
        await self._storage.drop(partition)
        self._create_waiting()

    async def close(self) -> None:
        self._serve(self._controller.close())
        while self._creating:
            created, name, _, _ = self._creating.popleft()
            if not created.done():
                created.set_exception(QueueClosed(f"the queue was closed while partition {name!r} waited for room"))

    # -- writing and reading

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        ids = as_integers(rows, "rows")
        self._check_columns(ids.size, columns)
        target = self._controller.partition(partition)
        positions = target.claim(ids, columns)
        self._begin(partition)
        try:
            await self._storage.write(partition, positions, columns)
            tasks = self._controller.partition(partition).commit(positions, columns)  # unless it was cleared meanwhile
        except BaseException:
            target.unclaim(positions, columns)
            raise
        finally:
            self._done(partition)
        self._serve(tasks)

    def _check_columns(self, rows: int, columns: Mapping[str, Column]) -> None:
        for name, column in columns.items():
            if name not in self.spec.columns:
                raise ValueError(f"column {name!r} is unknown; the schema has {sorted(self.spec.columns)}")
            self.spec.columns[name].check(name, rows, column)

    async def get(
        self,
        task: str,
        count: int,
        *,
        consumer: str = "0",
        rank: int = 0,
        minimum: int | None = None,
        partition: str | None = None,
        timeout_s: float | None = None,
    ) -> Batch | None:
        self._loop = asyncio.get_running_loop()
        ask = Ask(task, count, count if minimum is None else minimum, consumer, rank, partition)
        self._controller.check(ask)
        self._expire()
        answer = self._request(ask)
        if isinstance(answer, Grant):
            self._serve([task])  # what is left may now be another reader's last batch, or its share
        elif answer is Answer.WAIT:
            answer = await self._park(ask, timeout_s)
        return await self._deliver(answer) if isinstance(answer, Grant) else None

    def _request(self, ask: Ask) -> Grant | Answer:
        answer = self._controller.request(ask, self._now())
        if isinstance(answer, Grant):
            self._begin(answer.partition)
        return answer

    async def _deliver(self, grant: Grant) -> Batch:
        """Read what was granted; if that fails or is cancelled, the rows go back."""
        try:
            columns = await self._storage.read(grant.partition, grant.positions, self.spec.tasks[grant.task].columns)
        except BaseException:
            self._serve(self._controller.give_back(grant.lease))
            raise
        finally:
            self._done(grant.partition)
        return Batch(grant.partition, grant.rows, columns, grant.lease)

    def _begin(self, partition: str) -> None:
        self._busy[partition] = self._busy.get(partition, 0) + 1

    def _done(self, partition: str) -> None:
        self._busy[partition] -= 1
        if not self._busy[partition]:
            del self._busy[partition]
            idle = self._idle.pop(partition, None)
            if idle is not None and not idle.done():
                idle.set_result(None)

    # -- waiting

    async def _park(self, ask: Ask, timeout_s: float | None) -> Grant | Answer:
        parked = _Parked(ask, asyncio.get_running_loop().create_future())
        self._parked[ask.task].append(parked)
        self._set_alarm()
        with _deadline(parked.answer, timeout_s, lambda: f"after {timeout_s} s: {self._controller.explain(ask)}"):
            try:
                return await parked.answer
            except asyncio.CancelledError:
                if _granted(parked.answer):  # answered and cancelled at once
                    grant = parked.answer.result()
                    assert isinstance(grant, Grant)
                    self._done(grant.partition)
                    self._serve(self._controller.give_back(grant.lease))
                raise
            finally:
                if parked in self._parked[ask.task]:
                    self._parked[ask.task].remove(parked)
                self._set_alarm()

    def _serve(self, tasks: Iterable[str]) -> None:
        """Answer the parked gets of these tasks that can be, until none can: each answer may make another possible."""
        for task in tasks:
            while any([self._answer(parked) for parked in list(self._parked[task])]):
                pass
        self._set_alarm()

    def _answer(self, parked: _Parked) -> bool:
        if parked.answer.done():
            return False
        try:
            answer = self._request(parked.ask)
        except ValueError as error:
            parked.answer.set_exception(error)
        else:
            if answer is Answer.WAIT:
                return False
            parked.answer.set_result(answer)
        self._parked[parked.ask.task].remove(parked)
        return True

    async def set_bound(self, task: str, consumer: str, below: int) -> None:
        self._serve(self._controller.set_bound(task, consumer, below))

    # -- leases

    async def acknowledge(self, lease: int) -> None:
        self._expire()
        self._serve(self._controller.acknowledge(lease))

    async def give_back(self, lease: int) -> None:
        self._expire()
        self._serve(self._controller.give_back(lease))

    async def release(self, consumer: str) -> None:
        for parked in [p for waiting in self._parked.values() for p in waiting if p.ask.consumer == consumer]:
            self._parked[parked.ask.task].remove(parked)
            if not parked.answer.done():
                parked.answer.set_exception(LeaseExpired(f"consumer {consumer!r} was released while it waited"))
        self._serve(self._controller.release(consumer))

    def _expire(self) -> None:
        self._serve(self._controller.expire(self._now() + _TICK_S))

    def _set_alarm(self) -> None:
        """While somebody waits, wake up when the next lease runs out; otherwise the next call is early enough."""
        due = self._controller.next_due() if any(self._parked.values()) else None
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if due is not None:
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, due - self._now()), self._expire)

    # -- the rest

    async def describe(self) -> Mapping[str, Any]:
        self._expire()
        told = self._controller.describe()
        sizes = {name: self._storage.nbytes(name) for name in told["partitions"]}
        waiting = {task: len(parked) for task, parked in self._parked.items()}
        return told | {"bytes": sum(sizes.values()), "partition_bytes": sizes, "waiting_gets": waiting}

    @contextmanager
    def portal(self) -> Iterator[Portal[Any]]:
        loop = self._loop
        if loop is None or not loop.is_running():  # nobody else uses it: any loop will do
            with asyncio.Runner() as runner:
                yield runner.run
        else:
            yield partial(_run_in, loop)


def _run_in(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it in another thread's loop; an interrupt here takes it back there."""
    if asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError("this thread runs the queue's event loop and cannot wait for it: use `await` or `async for`")
    answer = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return answer.result()
    finally:
        answer.cancel()


def _granted(answer: asyncio.Future[Grant | Answer]) -> bool:
    return (
        answer.done() and not answer.cancelled() and answer.exception() is None and isinstance(answer.result(), Grant)
    )


@contextmanager
def _deadline(answer: asyncio.Future[Any], timeout_s: float | None, why: Callable[[], str]) -> Iterator[None]:
    """Fail the future with TimeoutError after so many seconds; `why` is asked only then."""

    def expire() -> None:
        if not answer.done():
            answer.set_exception(TimeoutError(why()))

    handle = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, expire)
    try:
        yield
    finally:
        if handle is not None:
            handle.cancel()
