"""The gets that wait. Those that ask the same under the same bound stand in one line: what one is refused, all are.

So with hundreds of readers of one task, a call that changes something asks once a line, not once a reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from harness.transfer_queue.control.asks import Answer, Ask, First
from harness.transfer_queue.frames import Handout

Line = tuple[int, int, int, str | None, First | None, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """A get that waits, numbered as it came."""

    number: int
    ask: Ask
    answer: asyncio.Future[Handout | Answer]

    @property
    def granted(self) -> Handout | None:
        """The rows that it was answered with, if any."""
        if not self.answer.done() or self.answer.cancelled() or self.answer.exception() is not None:
            return None
        answer = self.answer.result()
        return answer if isinstance(answer, Handout) else None


class Parking:
    """Lines in which gets wait, by task. bound: that of a task's consumer, None = none."""

    def __init__(self, tasks: Iterable[str], bound: Callable[[str, str], int | None]) -> None:
        self._bound = bound
        self._lines: dict[str, dict[Line, dict[Parked, None]]] = {task: {} for task in tasks}
        self._line_of: dict[Parked, Line] = {}  # in order of arrival
        self._by_consumer: dict[tuple[str, str], dict[Parked, None]] = {}
        self._following: dict[Parked, None] = {}  # those with `first`
        self._count = 0

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[Parked]:
        """Everybody, in order of arrival."""
        return iter(list(self._line_of))

    def __contains__(self, parked: Parked) -> bool:
        return parked in self._line_of

    def add(self, ask: Ask, answer: asyncio.Future[Handout | Answer]) -> Parked:
        parked = Parked(self._count, ask, answer)
        self._count += 1
        self._by_consumer.setdefault((ask.task, ask.consumer), {})[parked] = None
        if ask.first is not None:
            self._following[parked] = None
        self._join_line(parked)
        return parked

    def remove(self, parked: Parked) -> None:
        """It waits no longer; nothing to do if it did not wait."""
        if parked in self._line_of:
            self._leave_line(parked)
            del self._line_of[parked]
            self._following.pop(parked, None)
            del self._by_consumer[parked.ask.task, parked.ask.consumer][parked]

    def rebind(self, task: str, consumer: str) -> list[Parked]:
        """The bound of a consumer changed: its gets of this task, which now stand in other lines."""
        moved = list(self._by_consumer.get((task, consumer), ()))
        for parked in moved:
            self._leave_line(parked)
            self._join_line(parked)
        return moved

    def count(self, task: str) -> int:
        """How many gets of a task wait."""
        return sum(map(len, self._lines[task].values()))

    def next(self, task: str, refused: set[Line]) -> tuple[Line, Parked] | None:
        """Of the heads of the lines that were not refused, the one that came first."""
        heads = [(line, next(iter(waiting))) for line, waiting in self._lines[task].items() if line not in refused]
        return min(heads, key=lambda head: head[1].number, default=None)

    def followers(self, task: str) -> list[str]:
        """The tasks with a get that wants first what this task was handed."""
        asks = (parked.ask for parked in self._following)
        return list(dict.fromkeys(ask.task for ask in asks if ask.first is not None and ask.first[0] == task))

    def _join_line(self, parked: Parked) -> None:
        ask = parked.ask
        bound = self._bound(ask.task, ask.consumer)
        line = (ask.count, ask.minimum, ask.rank, ask.partition, ask.first, bound)
        self._line_of[parked] = line
        self._lines[ask.task].setdefault(line, {})[parked] = None

    def _leave_line(self, parked: Parked) -> None:
        line = self._line_of[parked]
        waiting = self._lines[parked.ask.task][line]
        del waiting[parked]
        if not waiting:
            del self._lines[parked.ask.task][line]


@contextmanager
def deadline(answer: asyncio.Future[Any], timeout_s: float | None, why: Callable[[], str]) -> Iterator[None]:
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
