"""The groups of a job, in partitions, and who waits for them: engines, to which they are handed out as the transfer
queue hands out rows, and roles, in the order of groups or as they come."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from harness.config.job import DEALT_AGAIN
from harness.cost_model.lengths import ResponseLengths
from harness.driver.places import Places, Verdict
from harness.transfer_queue.control.partition import limit

if TYPE_CHECKING:
    from harness.driver.event_model.engine import Engine

Wanted = range | None
"""Partitions whose groups an engine takes; None: any, the oldest first."""

Served = list[tuple["Engine", Sequence[int] | None]]


class Queue:
    """A partition for each batch, and behind them for groups in the place of those that are dropped. places: where
    groups may be refused; then there may be more of a partition until all of it is kept.

    Its attributes are many: lists by sample and by group take the place of columns.
    """

    def __init__(
        self,
        drawn: ResponseLengths,
        groups: int,
        batch: int,
        group_size: int,
        prompt: int,
        places: Places | None = None,
    ) -> None:
        self._drawn, self.group_size, self.prompt, self.places = drawn, group_size, prompt, places
        self.tokens = np.empty((0, group_size), np.int64)
        self.lengths, self.context, self.left = list[int](), list[int](), list[int]()  # by sample, as are those below
        self.start, self.end = list[int](), list[int]()
        self.unfinished, self.versions, self.oldest = list[int](), list[float](), list[int]()  # by group
        self.took = list[float]()  # seconds of each group in its engine
        self.part_of = list[int]()
        self.older: dict[int, tuple[int, float, int]] = {}  # of preempted samples: tokens, their versions, the oldest
        self.groups, self.admitted, self.closed = groups, 0, False
        self._next, self._ends = list[int](), list[int]()  # of each part: the group to hand out, the end
        self._again, self._open = list[list[int]](), list[int]()  # groups to hand out once more; those still to come
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
        self._again += [[] for _ in range(0, groups, size)]
        self._open += [size for _ in range(0, groups, size)]
        if self.places is not None:
            for place in range(0, groups, size):
                self.places.made(len(self._next) + place // size, first + place, size)
        self._next += range(first, first + groups, size)
        self._ends += range(first + size, first + groups + size, size)

    def admit(self, below: int) -> None:
        """Admit groups below this one, of one partition, and hand them out."""
        if self.admitted == self._ends[-1]:
            self._make_parts(below - self.admitted, below - self.admitted)
        self.admitted = min(below, self._ends[self.part_of[self.admitted]])
        self.serve()

    def take(self, parts: Wanted, wanted: int, bound: int, above: int = 0) -> Sequence[int] | None:
        """Groups of a partition, at most so many, below a bound, and `above` or more; of several partitions, of that
        which has given fewest. None of them where there is none yet, None where none will come."""
        if parts is None:
            while self._first < len(self._next) and self._all_out(self._first):
                self._first += 1
            part = self._first
            while above and part < len(self._next) and self._all_out(part, above):
                part += 1
            over = part == len(self._next) or (not self._again[part] and self._next[part] >= self.admitted)
            if over:
                return None if self.closed and (self.places is None or not any(self._open[:part])) else ()
        elif not any(self._open[part] for part in parts):
            return None
        elif len(parts) == 1:
            part = parts[0]
        else:
            there = [part for part in parts if self._is_there(part, bound)]
            part = min(there or parts, key=lambda part: self._next[part] - self._ends[part])
        taken = [group for group in self._again[part] if above <= group < bound][:wanted]
        for group in taken:
            self._again[part].remove(group)
        first = self._next[part]
        end = max(first, min(first + wanted - len(taken), self._ends[part], self.admitted, bound))
        self._next[part] = end
        if self.places is None:
            self._open[part] -= end - first
        return [*taken, *range(first, end)]

    def _all_out(self, part: int, above: int = 0) -> bool:
        return max(self._again[part], default=-1) < above and self._next[part] == self._ends[part]

    def _is_there(self, part: int, bound: int) -> bool:
        again = self._again[part]
        return bool(again) and again[0] < bound or self._next[part] < min(self._ends[part], self.admitted, bound)

    def number(self, group: int) -> int:
        """The group that is in a place, by its number."""
        assert self.places is not None
        return group + self.places.dealt.get(group, 0) * DEALT_AGAIN

    def keep(self, group: int) -> None:
        """Note that a group is not refused."""
        self._open[self.part_of[group]] -= 1
        self.serve()

    def refuse(self, group: int) -> None:
        """Hand a place out once more, with another group in it. Raises ConfigError where that is done too often."""
        assert self.places is not None
        part, n = self.part_of[group], self.group_size
        self.places.judge(part, {group: Verdict("filtered", [])})
        self.places.deal_again(group)
        drawn = self._drawn.of(self.number(group) * n + np.arange(n))
        samples = range(group * n, (group + 1) * n)
        self.tokens[group], self.unfinished[group] = drawn + self.prompt, n
        for sample, length in zip(samples, drawn.tolist(), strict=True):
            self.lengths[sample] = self.left[sample] = length
            self.context[sample] = self.prompt
            self.older.pop(sample, None)
        insort(self._again[part], group)
        self._first = min(self._first, part)
        self.serve()

    def give_back(self, groups: Iterable[int]) -> None:
        """Hand these groups out once more, to whoever comes."""
        for group in groups:
            insort(self._again[self.part_of[group]], group)
            self.unfinished[group] = self.group_size
            self._first = min(self._first, self.part_of[group])
            if self.places is None:
                self._open[self.part_of[group]] += 1

    def wait(self, engine: Engine) -> None:
        """Have an engine wait for groups."""
        self._asked += 1
        self._waiting[engine] = self._asked

    def forget(self, engine: Engine) -> None:
        """Note that an engine waits for nothing."""
        self._waiting.pop(engine, None)

    def rebind(self, engines: Sequence[Engine], below: int) -> Served:
        """Give engines another bound; those that wait stand behind others of that bound. What they and others get by
        it, `go_on` gives them."""
        served: Served = []
        for engine in engines:
            engine.bound = below
            if engine in self._waiting:
                self._waiting[engine] = self._waiting.pop(engine)
                served += self._hand_out([engine])
        return served + self._hand_out(self._waiting)

    def serve(self) -> None:
        """Hand groups to engines that wait for them, as far as there are some."""
        self.go_on(self._hand_out(self._waiting))

    def _hand_out(self, waiting: Iterable[Engine]) -> Served:
        """Hand groups out: of the lines in which engines that want the same stand
        (harness/transfer_queue/service/waiting.py), the head that asked first is next."""
        lines: dict[tuple[Wanted, int, int], deque[Engine]] = {}
        for engine in waiting:
            lines.setdefault((engine.wanted_of, engine.wanted, engine.bound), deque()).append(engine)
        served: Served = []
        while lines:
            key = min(lines, key=lambda key: self._waiting[lines[key][0]])
            engine = lines[key][0]
            taken = self.take(engine.wanted_of, engine.wanted, engine.bound, engine.above)
            if taken is None or taken:
                served.append((lines[key].popleft(), taken))
                del self._waiting[engine]
            if not lines[key] or (taken is not None and not taken):
                del lines[key]
        return served

    def go_on(self, served: Served) -> None:
        """Give engines what was handed out to them; they ask for more."""
        for engine, taken in served:
            if taken:
                engine.submit(taken)
            engine.ask()


class Frontier:
    """The groups that a role is done with; readers wait for all before one."""

    def __init__(self, groups: int) -> None:
        self._done, self.first = bytearray(groups + 1), 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    def add(self, groups: Sequence[int]) -> None:
        """Note groups that are done."""
        for group in groups:
            self._done[group] = 1
        self.first = self._done.find(0, self.first)
        if self._waiting:
            for needed, _, future in sorted(self._waiting, key=itemgetter(1)):
                if needed <= self.first:
                    future.set_result(None)
            self._waiting = [one for one in self._waiting if one[0] > self.first]

    async def reached(self, needed: int, turn: int = 0) -> None:
        """Wait for all groups before this one; of several that go on at once, the one with the lowest turn is first."""
        if self.first < needed:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((needed, turn, future))
            await future


class Arrivals:
    """Groups that one reader takes as they come, where the order is that of completion
    (harness/transfer_queue/control/policies.py): of one partition at a time, that whose first one came first."""

    def __init__(self, part_of: Sequence[int], window: int | None = None) -> None:
        """window: groups from the oldest that was not taken on, which may be taken."""
        self.taken, self._window, self._oldest, self._ahead = 0, window, 0, set[int]()
        self._started: dict[int, set[int]] = {}  # groups that are not taken yet, by the bound under which they began
        self._part_of, self._ready = part_of, dict[int, list[tuple[int, int]]]()
        self._most, self._due = 0, tuple[tuple[int, int], ...]()
        self._asked: asyncio.Future[list[int]] | None = None

    def add(self, groups: Iterable[int], tick: int = 0) -> None:
        """Note groups that came, of one partition; those of a lower tick, then of a lower number, go first."""
        for group in groups:
            insort(self._ready.setdefault(self._part_of[group], []), (tick, group))
        self._serve()

    def begun(self, groups: Iterable[int], bound: int) -> None:
        """Note under which bound an engine took groups."""
        self._started.setdefault(bound, set()).update(groups)

    def give_back(self, groups: Iterable[int]) -> None:
        """Note that these are to begin again, under whatever bound."""
        self._forget(groups)

    def drop(self, below: int) -> set[int]:
        """Take out what was begun under this bound or a lower one."""
        dropped = self._begun_under(below)
        self._forget(dropped)
        self._pass(dropped)
        for part, ready in self._ready.items():
            self._ready[part] = [one for one in ready if one[1] not in dropped]
        return dropped

    def ask(self, most: int, due: Iterable[tuple[int, int]] = ()) -> asyncio.Future[list[int]]:
        """Up to so many groups, as soon as there is one. due: (bound, n) pairs, bounds ascending: what was begun under
        this bound is among the first n that are ever taken (harness/transfer_queue/control/partition.py)."""
        self._most, self._due = most, tuple(due)
        self._asked = asked = asyncio.get_running_loop().create_future()
        self._serve()
        return asked

    def close(self) -> None:
        """All that is to be trained is: whoever waits gets nothing."""
        if self._asked is not None:
            self._asked.set_result([])
            self._asked = None

    def _serve(self) -> None:
        if self._asked is None:
            return
        most, bound = limit(self._due, self.taken, self._most, lambda bound: len(self._begun_under(bound)))
        ready = self._ready
        if bound is not None:
            among = self._begun_under(bound)
            ready = {part: [one for one in its if one[1] in among] for part, its in ready.items()}
        if self._window is not None:
            end = self._oldest + self._window
            ready = {part: [one for one in its if one[1] < end] for part, its in ready.items()}
        turns = [(its[0][0], part) for part, its in ready.items() if its]
        if not turns:
            return
        _, part = min(turns)
        taken = ready[part][:most]
        groups = [group for _, group in taken]
        self._ready[part] = [one for one in self._ready[part] if one not in taken]
        self._forget(groups)
        self.taken += len(groups)
        self._pass(groups)
        asked, self._asked = self._asked, None
        asked.set_result(groups)

    def _pass(self, groups: Iterable[int]) -> None:
        self._ahead.update(groups)
        while self._oldest in self._ahead:
            self._ahead.remove(self._oldest)
            self._oldest += 1

    def _begun_under(self, bound: int) -> set[int]:
        return set().union(*(groups for begun, groups in self._started.items() if begun <= bound))

    def _forget(self, groups: Iterable[int]) -> None:
        for started in self._started.values():
            started.difference_update(groups)
