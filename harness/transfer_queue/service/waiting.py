"""The calls that wait: gets for rows, partitions for capacity; and the timer of what runs out meanwhile."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.transfer_queue.control.spec import Bound, First, GetRequest, Status
from harness.transfer_queue.rows.frames import BatchAssignment

Line = tuple[int, int, int, str | None, First | None, tuple[int, ...] | None, Bound]
"""All of a request that its answer depends on, with its consumer's bound."""


@dataclass(slots=True, eq=False)
class PendingGet:
    """A get that waits, numbered as it came."""

    number: int
    request: GetRequest
    answer: asyncio.Future[BatchAssignment | Status]

    @property
    def granted(self) -> BatchAssignment | None:
        """The rows that it was answered with, if any."""
        if not self.answer.done() or self.answer.cancelled() or self.answer.exception() is not None:
            return None
        answer = self.answer.result()
        return answer if isinstance(answer, BatchAssignment) else None


class PendingGets:
    """The gets that wait, by task, in lines: those with the same request and bound stand in one, as what one of them is
    refused, all are. So with hundreds of readers of a task, a change is tried once a line, not once a reader.

    bound: that of a task's consumer."""

    def __init__(self, tasks: Iterable[str], bound: Callable[[str, str], Bound]) -> None:
        self._bound = bound
        self._lines: dict[str, dict[Line, dict[PendingGet, None]]] = {task: {} for task in tasks}
        self._line_of: dict[PendingGet, Line] = {}  # in order of arrival
        self._by_consumer: dict[tuple[str, str], dict[PendingGet, None]] = {}
        self._following: dict[PendingGet, None] = {}  # those with `first`
        self._count = 0

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[PendingGet]:
        """All, in order of arrival."""
        return iter(list(self._line_of))

    def __contains__(self, get: PendingGet) -> bool:
        return get in self._line_of

    def add(self, request: GetRequest, answer: asyncio.Future[BatchAssignment | Status]) -> PendingGet:
        """Add a get that waits."""
        get = PendingGet(self._count, request, answer)
        self._count += 1
        self._by_consumer.setdefault((request.task, request.consumer), {})[get] = None
        if request.first is not None:
            self._following[get] = None
        self._join_line(get)
        return get

    def remove(self, get: PendingGet) -> None:
        """Remove a get that waits no longer; nothing to do if it did not wait."""
        if get in self._line_of:
            self._leave_line(get)
            del self._line_of[get]
            self._following.pop(get, None)
            del self._by_consumer[get.request.task, get.request.consumer][get]

    def rebind(self, task: str, consumer: str) -> list[PendingGet]:
        """The bound of a consumer changed: its gets of this task, which now stand in other lines."""
        moved = list(self._by_consumer.get((task, consumer), ()))
        for get in moved:
            self._leave_line(get)
            self._join_line(get)
        return moved

    def count(self, task: str) -> int:
        """How many gets of a task wait."""
        return sum(map(len, self._lines[task].values()))

    def next(self, task: str, refused: set[Line]) -> tuple[Line, PendingGet] | None:
        """The get that came first, of the heads of the lines that were not refused."""
        heads = [(line, next(iter(waiting))) for line, waiting in self._lines[task].items() if line not in refused]
        return min(heads, key=lambda head: head[1].number, default=None)

    def followers(self, task: str) -> list[str]:
        """The tasks with a get that wants first what this task was handed."""
        requests = (get.request for get in self._following)
        return list(dict.fromkeys(r.task for r in requests if r.first is not None and r.first[0] == task))

    def _join_line(self, get: PendingGet) -> None:
        request = get.request
        bound = self._bound(request.task, request.consumer)
        line = (request.count, request.least, request.rank, request.partition, request.first, request.only, bound)
        self._line_of[get] = line
        self._lines[request.task].setdefault(line, {})[get] = None

    def _leave_line(self, get: PendingGet) -> None:
        line = self._line_of[get]
        waiting = self._lines[get.request.task][line]
        del waiting[get]
        if not waiting:
            del self._lines[get.request.task][line]


@dataclass(frozen=True, slots=True, eq=False)
class CapacityWaiter:
    """size: rows that it needs; act: what it came for, done as soon as there is room."""

    size: int
    act: Callable[[], None]
    what: str
    acted: asyncio.Future[None]


class CapacityWaiters:
    """The calls that wait for room, served in order of arrival; `fits`: whether there is room for so much now."""

    def __init__(self, fits: Callable[[int], bool]) -> None:
        self._fits = fits
        self._line: deque[CapacityWaiter] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[CapacityWaiter]:
        return iter(list(self._line))

    async def wait(
        self, size: int, act: Callable[[], None], what: str, timeout_s: float | None, why: Callable[[], str]
    ) -> None:
        """Returns when `act` was done; raises what it raised. TimeoutError after `timeout_s`, with `why`, which is
        asked only then."""
        waiter = CapacityWaiter(size, act, what, asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        self.advance()
        set_deadline(waiter.acted, timeout_s, lambda: f"no room for {what} in {timeout_s} s: {why()}")
        try:
            await waiter.acted
        finally:
            if waiter in self._line:
                self._line.remove(waiter)
            self.advance()  # those behind one that gave up

    def advance(self) -> None:
        """There may be room: serve the head of the line, as long as it fits."""
        while self._line and self._fits(self._line[0].size):
            waiter = self._line.popleft()
            if waiter.acted.done():
                continue
            try:
                waiter.act()
                waiter.acted.set_result(None)
            except Exception as error:  # it is the waiting caller's
                waiter.acted.set_exception(error)

    def refuse(self, error: Callable[[str], Exception]) -> None:
        """None of them will be served."""
        while self._line:
            waiter = self._line.popleft()
            if not waiter.acted.done():
                waiter.acted.set_exception(error(waiter.what))


def set_deadline(answer: asyncio.Future[Any], timeout_s: float | None, why: Callable[[], str]) -> None:
    """Fail the future with TimeoutError unless it is done in so many seconds; `why` is asked only then."""

    def expire() -> None:
        if not answer.done():
            answer.set_exception(TimeoutError(why()))

    if timeout_s is not None:
        timer = asyncio.get_running_loop().call_later(timeout_s, expire)
        answer.add_done_callback(lambda _: timer.cancel())


class Alarm:
    """Calls `ring` once, when `now` has come to the time that it was last set to: mostly the one it is set to
    already."""

    def __init__(self, now: Callable[[], float], ring: Callable[[], None]) -> None:
        self._now = now
        self._ring = ring
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due: float | None) -> None:
        """Seconds on the clock of `now`; None: not to ring."""
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, due
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._now()), self._rings)

    def _rings(self) -> None:
        self._timer = self._due = None
        self._ring()
