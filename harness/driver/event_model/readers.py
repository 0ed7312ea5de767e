"""Roles that wait for groups: in their order, or as they come."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Iterable, Sequence
from operator import itemgetter

from harness.transfer_queue.control.partition import limit


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
