"""The control plane inside one event loop: calls that have to wait do so here, and payload is freed when it can be."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness.transfer_queue.control.controller import Controller, QueueClosed
from harness.transfer_queue.control.leases import Lease, LeaseExpired
from harness.transfer_queue.control.spec import Bound, GetRequest, QueueSpec, Status
from harness.transfer_queue.rows.columns import Rows
from harness.transfer_queue.rows.frames import BatchAssignment, Frame
from harness.transfer_queue.service.waiting import Alarm, CapacityWaiters, Line, PendingGet, PendingGets, set_deadline
from harness.transfer_queue.storage.protocol import PayloadStore

_TICK_S = 1e-6  # a timer may ring a rounding error before the lease is due

Weights = Mapping[str, Rows]
"""Lengths of the rows of a put, int64 [rows], by ragged column that some task weighs rows by."""


def loop_time() -> float:
    """Time of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()


class PayloadLifetimes:
    """The lifetimes of payload: that of a cleared partition may go once no assignment of it is still to be read, nor to
    be saved.

    unconfirmed: assignments whose reader has not said that it received them, lease -> partition.
    """

    def __init__(self, store: PayloadStore, unconfirmed: Mapping[int, str]) -> None:
        self.unconfirmed = dict(unconfirmed)
        self._store = store
        self._cleared: set[str] = set()  # partitions whose payload is still there
        self._saving = Counter[str]()

    def dispatched(self, assignment: BatchAssignment) -> None:
        """Note that an assignment is to be read."""
        self.unconfirmed[assignment.lease] = assignment.partition

    def received(self, lease: int) -> bool:
        """Whether this was not known."""
        partition = self.unconfirmed.pop(lease, None)
        if partition is not None:
            self._free(partition)
        return partition is not None

    def being_read(self, partition: str) -> bool:
        """Whether an assignment of the partition is still to be read."""
        return partition in self.unconfirmed.values()

    def cleared(self, partition: str) -> None:
        """Note that a partition was cleared."""
        self._cleared.add(partition)
        self._free(partition)

    @contextmanager
    def saving(self, partitions: Collection[str]) -> Iterator[None]:
        """The payload of these partitions stays meanwhile."""
        self._saving.update(partitions)
        try:
            yield
        finally:
            self._saving.subtract(partitions)
            for partition in partitions:
                self._free(partition)

    def _free(self, partition: str) -> None:
        read = not self._store.pinned and self.being_read(partition)
        if partition in self._cleared and not read and not self._saving[partition]:
            self._cleared.remove(partition)
            self._store.drop(partition)


class QueueService:
    """The decisions of a queue, for clients in this process (`LocalQueue`) or behind sockets (`remote.server`).

    A get that cannot be served is pending, and is answered by the very call that makes it servable (a put, a bound, a
    clear, another reader taking the rest, ...) or by the timer of the lease that runs out. Only `create_partition` and
    `get` ever wait, and no other call waits for them. What the calls promise and raise stands in `queue.py`.

    now: the clock of leases, in seconds; the event loop's unless given. controller, unconfirmed: those of a queue that
    was saved.
    """

    def __init__(
        self,
        spec: QueueSpec,
        store: PayloadStore,
        now: Callable[[], float] = loop_time,
        controller: Controller | None = None,
        unconfirmed: Mapping[int, str] | None = None,
    ) -> None:
        self.spec = spec
        self.store = store
        self._controller = Controller(spec) if controller is None else controller
        self._payloads = PayloadLifetimes(store, unconfirmed or {})
        self._now = now
        self._pending = PendingGets(spec.tasks, self._controller.bound)
        self._creating = CapacityWaiters(self._controller.has_room)
        self._alarm = Alarm(now, self._ring)

    # -- partitions

    async def create_partition(
        self, name: str, rows: Iterable[int], group_size: int = 1, *, timeout_s: float | None = None
    ) -> None:
        """Create a partition, as `TransferQueue` says."""
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
        """Clear a partition."""
        self._expire()
        self._clear(partition)
        self._creating.advance()

    def clear_finished(self) -> list[str]:
        """Clear what all tasks are done with; returns the names."""
        self._expire()
        names = self._clear_over()
        self._creating.advance()
        return names

    def _clear_over(self) -> list[str]:
        """Clear finished partitions, but those of which a reader may still give something back because it was
        cancelled."""
        names = [name for name in self._controller.over() if not self._payloads.being_read(name)]
        for name in names:
            self._clear(name)
        for name in self._controller.in_the_way():
            if not self._payloads.being_read(name):
                self._controller.give_way(name)
        return names

    def _clear(self, name: str) -> None:
        self._serve(self._controller.clear(name))
        self._payloads.cleared(name)

    def _make_room(self) -> None:
        """Clear what all tasks are done with, where a call waits for room."""
        if self._creating:
            self._clear_over()
            self._creating.advance()

    def close(self) -> None:
        """Close the queue: what waits for room is refused."""
        self._serve(self._controller.close())
        self._creating.refuse(lambda what: QueueClosed(f"the queue was closed while {what} waited for room"))

    # -- writing and reading

    def check_partition(self, name: str) -> None:
        """ValueError unless there is this partition."""
        self._controller.partition(name)

    def put(self, partition: str, rows: Rows, frame: Frame, weights: Weights) -> None:
        """Write a frame, as `TransferQueue.put` says: its rows have room since their partition was created."""
        self._serve(self._controller.put(partition, rows, frame, weights, self._now()))
        self._make_room()

    def try_get(self, request: GetRequest) -> BatchAssignment | Status:
        """Rows, or why there are none."""
        request.check(self.spec)
        self._expire()
        return self._first_answer(self._controller.anchored(request))

    async def get(self, request: GetRequest) -> BatchAssignment | None:
        """Assign rows, as `TransferQueue.get` says."""
        answer = self.try_get(request)
        if answer is Status.WAIT:
            pending = self.wait_for(request)
            try:
                answer = await pending.answer
            except asyncio.CancelledError:
                self.withdraw(pending)
                raise
            finally:
                self.answered(pending)
        return answer if isinstance(answer, BatchAssignment) else None

    def _first_answer(self, request: GetRequest) -> BatchAssignment | Status:
        answer = self._dispatch(request)
        if isinstance(answer, BatchAssignment):
            self._serve([request.task])  # what is left may now be another reader's last batch, or its share
            self._make_room()
        return answer

    def _dispatch(self, request: GetRequest) -> BatchAssignment | Status:
        answer = self._controller.dispatch(request, self._now())
        if isinstance(answer, BatchAssignment):
            self._payloads.dispatched(answer)
        return answer

    def received(self, lease: int) -> None:
        """The reader has read what it was handed, and will not withdraw its get any more."""
        if self._payloads.received(lease):
            self._make_room()

    # -- waiting

    def wait_for(self, request: GetRequest) -> PendingGet:
        """Let a get wait that `try_get` has just refused; when it is done with, `answered` is to be called."""
        pending = self._pending.add(self._controller.anchored(request), asyncio.get_running_loop().create_future())
        self._set_alarm()
        limit = request.timeout_s
        set_deadline(pending.answer, limit, lambda: f"after {limit} s: {self._controller.explain(pending.request)}")
        return pending

    def answered(self, pending: PendingGet) -> None:
        """The get waits no longer."""
        self._pending.remove(pending)
        self._set_alarm()

    def withdraw(self, pending: PendingGet) -> None:
        """Take back a get whose caller has gone: it takes nothing, and rows that answered it already are given back."""
        if (assignment := pending.granted) is not None:
            self.give_back(assignment.lease)
        pending.answer.cancel()

    def _serve(self, tasks: Iterable[str]) -> None:
        """Serve tasks that may have been handed something, or have more to get: answer the pending gets that can be, of
        them and of tasks that want first what these were handed, until none can: each answer may make another
        possible."""
        if self._pending:
            todo = [follower for task in tasks for follower in (task, *self._pending.followers(task))]
            while todo:
                task = todo.pop(0)
                if self._serve_task(task):
                    todo += self._pending.followers(task)
        self._set_alarm()

    def _serve_task(self, task: str) -> bool:
        """Try the head of each line, in order of arrival; whether any was answered."""
        answered, refused = False, set[Line]()
        while (head := self._pending.next(task, refused)) is not None:
            line, pending = head
            if self._answer(pending):
                answered = True
                refused.clear()
            else:
                refused.add(line)
        return answered

    def _answer(self, pending: PendingGet) -> bool:
        """Whether it waits no longer."""
        if not pending.answer.done():  # otherwise it was cancelled, or timed out, and has not run since
            try:
                answer = self._dispatch(pending.request)
            except ValueError as error:
                pending.answer.set_exception(error)
            else:
                if answer is Status.WAIT:
                    return False
                pending.answer.set_result(answer)
        self._pending.remove(pending)
        return True

    def set_bound(self, task: str, consumer: str, below: int, above: int = 0) -> None:
        """Hand the consumer only rows within the bound from now on."""
        self._controller.set_bound(task, consumer, Bound(below, above))
        if any([self._answer(pending) for pending in self._pending.rebind(task, consumer)]):
            self._serve([task])

    def drop(self, task: str, started: str, below: int) -> list[int]:
        """Drop rows, as `TransferQueue.drop` says; returns them."""
        rows, tasks = self._controller.drop(task, started, below)
        self._serve(tasks)
        self._make_room()
        return rows

    def begin_again(self, partition: str, rows: Iterable[int]) -> None:
        """Let rows begin again, as `TransferQueue` says."""
        self._serve(self._controller.begin_again(partition, [int(row) for row in rows]))

    def give_up(self, partition: str, rows: Iterable[int]) -> None:
        """Give rows up, as `TransferQueue` says."""
        self._serve(self._controller.give_up(partition, [int(row) for row in rows]))
        self._make_room()

    def finish(self, task: str, rows: Iterable[int]) -> None:
        """Finish rows for a task, as `TransferQueue` says."""
        self._serve(self._controller.finish(task, rows))
        self._make_room()

    def waiting_now(self) -> list[str]:
        """One line for each call that waits; at once, so that it can be reported where nothing in the event loop goes
        on."""
        gets = [f"consumer {p.request.consumer!r} of {self._controller.explain(p.request)}" for p in self._pending]
        slowest = self._controller.slowest_task
        return gets + [f"room for {waiter.what}: {slowest()}" for waiter in self._creating]

    # -- leases

    def acknowledge(self, lease: int) -> None:
        """Acknowledge a lease."""
        self._expire()
        self.received(lease)
        self._serve(self._controller.acknowledge(lease))
        self._make_room()

    def give_back(self, lease: int) -> None:
        """Give a lease back: its rows go out again."""
        self._expire()
        self._serve(self._controller.give_back(lease))
        self.received(lease)

    def reassign(self, task: str, rows: Iterable[int], consumer: str) -> None:
        """Put what is held of these rows into the hands of a consumer."""
        self._controller.reassign(task, rows, consumer)

    def release(self, consumer: str) -> None:
        """Release what a consumer holds or waits for."""
        for pending in [p for p in self._pending if p.request.consumer == consumer]:
            self._pending.remove(pending)
            if not pending.answer.done():
                pending.answer.set_exception(LeaseExpired(f"consumer {consumer!r} was released while it waited"))
        self._serve(self._controller.release(consumer))

    def lose(self, leases: Iterable[int]) -> None:
        """The holders of these have gone: what never arrived, or is of a task with `lease_s`, goes out again."""
        held = list(leases)
        for lease in [lease for lease in held if lease in self._payloads.unconfirmed]:
            self.give_back(lease)
        self._serve(self._controller.lose(held))

    def _expire(self) -> None:
        if tasks := self._controller.expire(self._now() + _TICK_S):
            self._serve(tasks)

    def _set_alarm(self) -> None:
        """Set the alarm for the next lease that runs out while a call waits; otherwise the next call is early
        enough."""
        due = self._controller.next_due()
        self._alarm.set(due if due is not None and (self._pending or self._creating) else None)

    def _ring(self) -> None:
        self._expire()
        self._set_alarm()

    def open_leases(self) -> list[Lease]:
        """Leases that were dispatched and not acknowledged. After a restart: release, or lose, what no reader has any
        more."""
        return self._controller.open_leases()

    # -- reporting and saving

    @contextmanager
    def moment(self) -> Iterator[tuple[dict[str, Any], list[tuple[str, Frame]]]]:
        """The state as of now, but for the calls that wait: to be encoded at once. And the frames, with their
        partitions, whose payload stays meanwhile."""
        frames = self._controller.frames()
        with self._payloads.saving({partition for partition, _ in frames}):
            unconfirmed = list(self._payloads.unconfirmed.items())
            yield {"now": self._now(), "unconfirmed": unconfirmed, "controller": self._controller.state()}, frames

    def describe(self) -> Mapping[str, Any]:
        """The queue's state, for people."""
        self._expire()
        waiting = {task: self._pending.count(task) for task in self.spec.tasks}
        return self._controller.describe() | {"waiting_gets": waiting}
