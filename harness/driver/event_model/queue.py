"""The groups of a job, in partitions, and the engines that wait for them: as the transfer queue hands rows out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from harness.cost_model.lengths import ResponseLengths

if TYPE_CHECKING:
    from harness.driver.event_model.engine import Engine

Served = list[tuple["Engine", range | None]]


class Queue:
    """A partition for each batch, and behind them for groups in the place of those that are dropped.

    Its attributes are many: lists by sample and by group take the place of columns.
    """

    def __init__(self, drawn: ResponseLengths, groups: int, batch: int, group_size: int, prompt: int) -> None:
        self._drawn, self.group_size, self.prompt = drawn, group_size, prompt
        self.tokens = np.empty((0, group_size), np.int64)
        self.lengths, self.context, self.left = list[int](), list[int](), list[int]()  # by sample, as are those below
        self.start, self.end = list[int](), list[int]()
        self.unfinished, self.versions, self.oldest = list[int](), list[float](), list[int]()  # by group
        self.took = list[float]()  # seconds of each group in its engine
        self.part_of = list[int]()
        self.older: dict[int, tuple[int, float, int]] = {}  # of preempted samples: tokens, their versions, the oldest
        self.groups, self.admitted, self.closed = groups, 0, False
        self._next, self._ends = list[int](), list[int]()  # of each part: the group to hand out, the end
        self._first = 0  # partition that has some
        self._waiting: dict[Engine, int] = {}  # and when each asked
        self._asked = 0
        self._make_parts(groups, batch)

    def _make_parts(self, groups: int, size: int) -> None:
        """Make partitions of so many groups more, each of `size`."""
        n, first = self.group_size, len(self.part_of)
        drawn = self._drawn.of(np.arange(first * n, (first + groups) * n))
        self.tokens = np.concatenate((self.tokens, (drawn + self.prompt).reshape(groups, n)))
        lengths: list[int] = drawn.tolist()
        self.lengths += lengths
        self.left += lengths
        self.context += [self.prompt] * len(lengths)
        self.start += [0] * len(lengths)
        self.end += [0] * len(lengths)
        self.unfinished += [n] * groups
        self.versions += [0.0] * groups
        self.oldest += [0] * groups
        self.took += [0.0] * groups
        self.part_of += [len(self._next) + group // size for group in range(groups)]
        self._next += range(first, first + groups, size)
        self._ends += range(first + size, first + groups + size, size)

    def admit(self, below: int) -> None:
        """Admit groups below this one, of one partition, and hand them out."""
        if self.admitted == self._ends[-1]:
            self._make_parts(below - self.admitted, below - self.admitted)
        self.admitted = min(below, self._ends[self.part_of[self.admitted]])
        self.serve()

    def take(self, part: int | None, wanted: int, bound: int) -> range | None:
        """Groups of a partition, or of the oldest that has some, at most so many and below a bound; an empty range
        where none is there yet, None where none will come."""
        if part is None:
            while self._first < len(self._next) and self._next[self._first] == self._ends[self._first]:
                self._first += 1
            if self._first == len(self._next) or self._next[self._first] >= self.admitted:
                return None if self.closed else range(0)
            part = self._first
        elif self._next[part] == self._ends[part]:
            return None
        first = self._next[part]
        end = min(first + wanted, self._ends[part], self.admitted, bound)
        if end <= first:
            return range(0)
        self._next[part] = end
        return range(first, end)

    def wait(self, engine: Engine) -> None:
        """Have an engine wait for groups."""
        self._asked += 1
        self._waiting[engine] = self._asked

    def rebind(self, engines: Sequence[Engine], below: int) -> None:
        """Give engines another bound; those that wait stand behind others of that bound."""
        served: Served = []
        for engine in engines:
            engine.bound = below
            if engine in self._waiting:
                self._waiting[engine] = self._waiting.pop(engine)
                served += self._hand_out([engine])
        self._go_on(served + self._hand_out(self._waiting))

    def serve(self) -> None:
        """Hand groups to engines that wait for them, as far as there are some."""
        self._go_on(self._hand_out(self._waiting))

    def _hand_out(self, waiting: Iterable[Engine]) -> Served:
        """Hand groups out: of the lines in which engines that want the same stand
        (harness/transfer_queue/service/waiting.py), the head that asked first is next."""
        lines: dict[tuple[int | None, int, int], deque[Engine]] = {}
        for engine in waiting:
            lines.setdefault((engine.wanted_of, engine.wanted, engine.bound), deque()).append(engine)
        served: Served = []
        while lines:
            key = min(lines, key=lambda key: self._waiting[lines[key][0]])
            engine = lines[key][0]
            taken = self.take(engine.wanted_of, engine.wanted, engine.bound)
            if taken is None or taken:
                served.append((lines[key].popleft(), taken))
                del self._waiting[engine]
            if not lines[key] or (taken is not None and not taken):
                del lines[key]
        return served

    def _go_on(self, served: Served) -> None:
        for engine, taken in served:
            if taken:
                engine.submit(taken)
            engine.ask()
