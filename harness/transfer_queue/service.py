"""The control plane at work inside one event loop: it keeps the books, and whoever has to wait waits here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness.transfer_queue.alarm import Alarm
from harness.transfer_queue.columns import Rows
from harness.transfer_queue.control.asks import Answer, Ask
from harness.transfer_queue.control.controller import QueueClosed
from harness.transfer_queue.control.leases import Lease, LeaseExpired
from harness.transfer_queue.control.restorable import RestorableController
from harness.transfer_queue.frames import Frame, Handout
from harness.transfer_queue.parking import Line, Parked, Parking, deadline
from harness.transfer_queue.payloads import Payloads
from harness.transfer_queue.room import RoomLine
from harness.transfer_queue.spec import QueueSpec
from harness.transfer_queue.storage.protocol import Keeper

_TICK_S = 1e-6  # a timer may ring a rounding error before the lease is due

Weights = Mapping[str, Rows]
"""By ragged column that some task weighs rows by: the length of each row of a put, int64 [rows]."""


def loop_time() -> float:
    return asyncio.get_running_loop().time()


class QueueService:
    """What a queue decides, for clients in this process (`LocalQueue`) or behind sockets (`remote.server`).

    A get that cannot be served is parked, and is answered by the very call that makes it servable (a put, a bound, a
    clear, another reader taking the rest, ...) or by the timer of the lease that runs out. Only `create_partition`,
    `put` and `get` ever wait, and nobody waits for them. What the calls promise and raise stands in `queue.py`.

    now: the clock of leases, in seconds; the event loop's unless given. controller, on_the_way: those of a queue that
    was saved.
    """

    def __init__(
        self,
        spec: QueueSpec,
        keeper: Keeper,
        now: Callable[[], float] = loop_time,
        controller: RestorableController | None = None,
        on_the_way: Mapping[int, str] | None = None,
    ) -> None:
        self.spec = spec
        self.keeper = keeper
        self._controller = RestorableController(spec) if controller is None else controller
        self._payloads = Payloads(keeper, on_the_way or {})
        self._now = now
        self._parking = Parking(spec.tasks, self._controller.bound)
        self._creating = RoomLine(self._controller.has_room)
        self._writing = RoomLine(self._controller.has_bytes)
        self._alarm = Alarm(now, self._ring)

    # -- partitions

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        ids = self._controller.check_new(name, rows, group_size)

        def create() -> None:
            self._controller.create(name, ids, group_size)

        if not self._creating and self._controller.has_room(ids.size):
            return create()
        self._expire()
        self._clear_over()
        what = f"the {ids.size} rows of partition {name!r}"
        await self._creating.wait(ids.size, create, what, timeout_s, self._controller.slowest_task)

    def clear(self, partition: str) -> None:
        self._expire()
        self._clear(partition)
        self._let_in()

    def clear_finished(self) -> list[str]:
        self._expire()
        names = self._clear_over()
        self._let_in()
        return names

    def _clear_over(self) -> list[str]:
        """What a reader may still give back, because it was cancelled, is not over."""
        names = [name for name in self._controller.over() if not self._payloads.being_read(name)]
        for name in names:
            self._clear(name)
        return names

    def _clear(self, name: str) -> None:
        self._serve(self._controller.clear(name))
        self._payloads.cleared(name)

    def _make_room(self) -> None:
        """What all tasks are done with goes, where somebody waits for room."""
        if self._creating or self._writing:
            self._clear_over()
            self._let_in()

    def _let_in(self) -> None:
        self._creating.advance()
        self._writing.advance()

    def close(self) -> None:
        self._serve(self._controller.close())
        self._creating.turn_away(lambda what: QueueClosed(f"the queue was closed while {what} waited for room"))

    # -- writing and reading

    def check_partition(self, name: str) -> None:
        """ValueError unless there is this partition."""
        self._controller.partition(name)

    def try_put(self, partition: str, rows: Rows, frame: Frame, weights: Weights) -> bool:
        """Whether there was room. Only bytes can be short: rows have room since their partition was created."""
        if self._controller.has_bytes(frame.nbytes):
            self._put(partition, rows, frame, weights)
            return True
        self._controller.check_put(partition, rows, frame, weights)
        return False

    async def put(
        self, partition: str, rows: Rows, frame: Frame, weights: Weights, *, timeout_s: float | None = None
    ) -> None:
        if self.try_put(partition, rows, frame, weights):
            return
        self._expire()
        self._clear_over()

        def put() -> None:
            self._put(partition, rows, frame, weights)

        what = f"a put of {frame.nbytes} bytes to partition {partition!r}"
        await self._writing.wait(frame.nbytes, put, what, timeout_s, self._controller.slowest_task)

    def _put(self, partition: str, rows: Rows, frame: Frame, weights: Weights) -> None:
        self._serve(self._controller.put(partition, rows, frame, weights, self._now()))
        self._make_room()

    def try_get(self, ask: Ask) -> Handout | Answer:
        """Rows, or why there are none."""
        ask.check(self.spec)
        self._expire()
        return self._first_answer(self._controller.counted(ask))

    async def get(self, ask: Ask, *, timeout_s: float | None = None) -> Handout | None:
        ask.check(self.spec)
        self._expire()
        ask = self._controller.counted(ask)
        answer = self._first_answer(ask)
        if answer is Answer.WAIT:
            answer = await self._park(ask, timeout_s)
        return answer if isinstance(answer, Handout) else None

    def _first_answer(self, ask: Ask) -> Handout | Answer:
        answer = self._request(ask)
        if isinstance(answer, Handout):
            self._serve([ask.task])  # what is left may now be another reader's last batch, or its share
            self._make_room()
        return answer

    def _request(self, ask: Ask) -> Handout | Answer:
        answer = self._controller.request(ask, self._now())
        if isinstance(answer, Handout):
            self._payloads.handed(answer)
        return answer

    def received(self, lease: int) -> None:
        """The reader has read what it was handed, and will not withdraw its get any more."""
        if self._payloads.received(lease):
            self._make_room()

    # -- waiting

    async def _park(self, ask: Ask, timeout_s: float | None) -> Handout | Answer:
        parked = self._parking.add(ask, asyncio.get_running_loop().create_future())
        self._set_alarm()
        with deadline(parked.answer, timeout_s, lambda: f"after {timeout_s} s: {self._controller.explain(ask)}"):
            try:
                return await parked.answer
            except asyncio.CancelledError:
                if (handout := parked.granted) is not None:  # answered and cancelled at once
                    self.give_back(handout.lease)
                raise
            finally:
                self._parking.remove(parked)
                self._set_alarm()

    def _serve(self, tasks: Iterable[str]) -> None:
        """These tasks may have been handed something, or have more to get: answer the parked gets that can be, theirs
        and those of tasks that want first what these were handed, until none can: each answer may make another
        possible."""
        if self._parking:
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

    def set_bound(self, task: str, consumer: str, below: int) -> None:
        self._controller.set_bound(task, consumer, below)
        if any([self._answer(parked) for parked in self._parking.rebind(task, consumer)]):
            self._serve([task])

    def drop(self, task: str, started: str, below: int) -> list[int]:
        rows, tasks = self._controller.drop(task, started, below)
        self._serve(tasks)
        self._make_room()
        return rows

    def waiting_now(self) -> list[str]:
        """One line for each call that waits: also for whoever reports that nothing in this event loop can go on."""
        gets = [f"consumer {p.ask.consumer!r} of {self._controller.explain(p.ask)}" for p in self._parking]
        slowest = self._controller.slowest_task
        return gets + [f"room for {w.what}: {slowest()}" for line in (self._creating, self._writing) for w in line]

    # -- leases

    def acknowledge(self, lease: int) -> None:
        self._expire()
        self.received(lease)
        self._serve(self._controller.acknowledge(lease))
        self._make_room()

    def give_back(self, lease: int) -> None:
        self._expire()
        self._serve(self._controller.give_back(lease))
        self.received(lease)

    def release(self, consumer: str) -> None:
        for parked in [p for p in self._parking if p.ask.consumer == consumer]:
            self._parking.remove(parked)
            if not parked.answer.done():
                parked.answer.set_exception(LeaseExpired(f"consumer {consumer!r} was released while it waited"))
        self._serve(self._controller.release(consumer))

    def lose(self, leases: Iterable[int]) -> None:
        """Whoever held these has gone: what tasks with leases handed out, or never arrived, goes out again."""
        held = list(leases)
        for lease in [lease for lease in held if lease in self._payloads.on_the_way]:
            self.give_back(lease)
        self._serve(self._controller.lose(held))

    def _expire(self) -> None:
        if tasks := self._controller.expire(self._now() + _TICK_S):
            self._serve(tasks)

    def _set_alarm(self) -> None:
        """While somebody waits, wake up when the next lease runs out; otherwise the next call is early enough."""
        waits = self._parking or self._creating or self._writing
        self._alarm.set(self._controller.next_due() if waits else None)

    def _ring(self) -> None:
        self._expire()
        self._set_alarm()

    def open_leases(self) -> list[Lease]:
        """What is in somebody's hands. After a restart: release, or lose, what nobody has any more."""
        return self._controller.open_leases()

    # -- the rest

    @contextmanager
    def moment(self) -> Iterator[tuple[dict[str, Any], list[tuple[str, Frame]]]]:
        """The state as of now, but for those who wait: to be encoded at once. And the frames, with their partitions,
        whose payload stays meanwhile."""
        frames = self._controller.frames()
        with self._payloads.saving({partition for partition, _ in frames}):
            on_the_way = list(self._payloads.on_the_way.items())
            yield {"now": self._now(), "on_the_way": on_the_way, "controller": self._controller.state()}, frames

    def describe(self) -> Mapping[str, Any]:
        self._expire()
        waiting = {task: self._parking.count(task) for task in self.spec.tasks}
        return self._controller.describe() | {"waiting_gets": waiting}
