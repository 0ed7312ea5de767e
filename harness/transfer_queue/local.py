"""The queue inside one event loop: the controller, a storage, and the readers that wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from harness.transfer_queue.columns import Batch, Column, Rows, as_integers
from harness.transfer_queue.control.asks import Answer, Ask, First, Grant
from harness.transfer_queue.control.controller import Controller, QueueClosed
from harness.transfer_queue.control.leases import LeaseExpired
from harness.transfer_queue.parking import Line, Parked, Parking, deadline
from harness.transfer_queue.portal import portal_into
from harness.transfer_queue.queue import Portal
from harness.transfer_queue.spec import QueueSpec
from harness.transfer_queue.storage import LocalStorage, Storage

_TICK_S = 1e-6  # a timer may ring a rounding error before the lease is due


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
        self._parking = Parking(spec.tasks, self._controller.bound)
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
        await self._make_room()
        with deadline(created, timeout_s, lambda: f"{why}: {self._controller.slowest_task()}"):
            try:
                await created
            finally:
                if turn in self._creating:
                    self._creating.remove(turn)
                self._create_waiting()  # whoever stood behind one that gave up

    async def _make_room(self) -> None:
        """What all tasks are done with goes, where a partition waits to be created."""
        if self._creating:
            await self.clear_finished()

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
        await self._free(partition)

    async def clear_finished(self) -> list[str]:
        self._expire()
        names = [name for name in self._controller.over() if name not in self._busy]
        for name in names:
            self._serve(self._controller.clear(name))
        for name in names:
            await self._free(name)
        return names

    async def _free(self, partition: str) -> None:
        """Drop the payload of a cleared partition, once nobody reads it, and let in who waits for the room."""
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
            tasks = self._controller.commit(partition, positions, columns)
        except BaseException:
            target.unclaim(positions, columns)
            raise
        finally:
            self._done(partition)
        self._serve(tasks)
        await self._make_room()

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
        first: First | None = None,
        timeout_s: float | None = None,
    ) -> Batch | None:
        self._loop = asyncio.get_running_loop()
        ask = Ask(task, count, count if minimum is None else minimum, consumer, rank, partition, first)
        ask.check(self.spec)
        self._expire()
        ask = self._controller.counted(ask)
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
        await self._make_room()
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
        parked = self._parking.add(ask, asyncio.get_running_loop().create_future())
        self._set_alarm()
        with deadline(parked.answer, timeout_s, lambda: f"after {timeout_s} s: {self._controller.explain(ask)}"):
            try:
                return await parked.answer
            except asyncio.CancelledError:
                if (grant := parked.granted) is not None:  # answered and cancelled at once
                    self._done(grant.partition)
                    self._serve(self._controller.give_back(grant.lease))
                raise
            finally:
                self._parking.remove(parked)
                self._set_alarm()

    def _serve(self, tasks: Iterable[str]) -> None:
        """These tasks may have been handed something, or have more to get: answer the parked gets that can be, theirs
        and those of tasks that want first what these were handed, until none can: each answer may make another
        possible."""
        todo = [follower for task in tasks for follower in (task, *self._parking.followers(task))]
        while todo:
            task = todo.pop(0)
            if self._serve_task(task):
                todo += self._parking.followers(task)
        self._set_alarm()

    def _serve_task(self, task: str) -> bool:
        """Ask for the head of each line, in order of arrival; whether any was answered."""
        answered, refused = False, set[Line]()
        while (head := self._parking.next(task, refused)) is not None:
            line, parked = head
            if self._answer(parked):
                answered = True
                refused.clear()
            else:
                refused.add(line)
        return answered

    def _answer(self, parked: Parked) -> bool:
        """Whether it waits no longer."""
        if not parked.answer.done():  # otherwise it was cancelled, or timed out, and has not run since
            try:
                answer = self._request(parked.ask)
            except ValueError as error:
                parked.answer.set_exception(error)
            else:
                if answer is Answer.WAIT:
                    return False
                parked.answer.set_result(answer)
        self._parking.remove(parked)
        return True

    async def set_bound(self, task: str, consumer: str, below: int) -> None:
        self._controller.set_bound(task, consumer, below)
        if any([self._answer(parked) for parked in self._parking.rebind(task, consumer)]):
            self._serve([task])

    async def drop(self, task: str, started: str, below: int) -> list[int]:
        rows, tasks = self._controller.drop(task, started, below)
        self._serve(tasks)
        return rows

    async def waiting(self) -> list[str]:
        return self.waiting_now()

    def waiting_now(self) -> list[str]:
        """As `waiting`, for whoever reports that nothing in this event loop can go on."""
        gets = [f"consumer {p.ask.consumer!r} of {self._controller.explain(p.ask)}" for p in self._parking]
        room = [
            f"partition {name!r} waits for room for {ids.size} rows: {self._controller.slowest_task()}"
            for _, name, ids, _ in self._creating
        ]
        return gets + room

    # -- leases

    async def acknowledge(self, lease: int) -> None:
        self._expire()
        self._serve(self._controller.acknowledge(lease))
        await self._make_room()

    async def give_back(self, lease: int) -> None:
        self._expire()
        self._serve(self._controller.give_back(lease))

    async def release(self, consumer: str) -> None:
        for parked in [p for p in self._parking if p.ask.consumer == consumer]:
            self._parking.remove(parked)
            if not parked.answer.done():
                parked.answer.set_exception(LeaseExpired(f"consumer {consumer!r} was released while it waited"))
        self._serve(self._controller.release(consumer))

    def _expire(self) -> None:
        self._serve(self._controller.expire(self._now() + _TICK_S))

    def _set_alarm(self) -> None:
        """While somebody waits, wake up when the next lease runs out; otherwise the next call is early enough."""
        due = self._controller.next_due() if self._parking else None
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
        waiting = {task: self._parking.count(task) for task in self.spec.tasks}
        return told | {"bytes": sum(sizes.values()), "partition_bytes": sizes, "waiting_gets": waiting}

    def portal(self) -> AbstractContextManager[Portal[Any]]:
        return portal_into(self._loop)
