"""Agreements of the ranks of a world on an order, and counts of how far they are. Nobody polls; nothing is saved."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable


class Meetings:
    """Agreements and counts inside one event loop, by the name of the world that they are of."""

    def __init__(self) -> None:
        self._given = Counter[str]()  # numbers of each world
        self._asked: dict[tuple[str, str], dict[int, asyncio.Future[int]]] = defaultdict(dict)
        self._counts = Counter[tuple[str, str]]()
        self._waiting: dict[tuple[str, str], dict[asyncio.Future[int], int]] = defaultdict(dict)

    async def agree(self, world: str, what: str, rank: int, ranks: int) -> int:
        """Ask for `what`, once on each of a world's ranks. Its number, from 1, once all of them have asked: numbers are
        given in the order in which that happened. ValueError for a rank that the world lacks, or that asks again."""
        asked = self._asked[world, what]
        if not 0 <= rank < ranks or rank in asked:
            raise ValueError(f"rank {rank} of {ranks} cannot ask for {what} of {world}, or did so before")
        mine = asked[rank] = asyncio.get_running_loop().create_future()
        if len(asked) == ranks:
            self._given[world] += 1
            _answer(self._asked.pop((world, what)).values(), self._given[world])
        return await mine

    def lacking(self, world: str, what: str, ranks: int) -> list[int]:
        """The ranks that have not asked, of something that is not agreed on yet."""
        asked = self._asked.get((world, what), {})
        return [rank for rank in range(ranks) if rank not in asked] if asked else []

    def note(self, world: str, what: str, count: int) -> None:
        """Note that a count is so far now. ValueError where it would fall."""
        if count < self._counts[world, what]:
            raise ValueError(f"{what} of {world} is at {self._counts[world, what]}, and cannot fall to {count}")
        self._counts[world, what] = count
        waiting = self._waiting[world, what]
        _answer([one for one, least in waiting.items() if least <= count], count)

    async def reached(self, world: str, what: str, least: int) -> int:
        """The count, once it is so far at least; it begins at 0."""
        if (count := self._counts[world, what]) >= least:
            return count
        waiting, mine = self._waiting[world, what], asyncio.get_running_loop().create_future()
        waiting[mine] = least
        try:
            return await mine
        finally:
            del waiting[mine]


def _answer(waiting: Iterable[asyncio.Future[int]], number: int) -> None:
    for one in waiting:
        if not one.done():  # else its asker has gone
            one.set_result(number)
