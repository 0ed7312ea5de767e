"""The samples that decode together: when each finishes, and the room that they take in the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from engines.simulated.samples import SimulatedSample


class RunningSamples:
    """room: tokens that the cache holds, None for no limit. `count` is the engine's decode steps so far.

    A step makes every context longer by a token, and all of them must fit. It may begin only if they will.
    """

    def __init__(self, room: int | None) -> None:
        self._room = room
        self._admitted = 0  # so many samples, ever; numbers them
        self._samples: dict[int, SimulatedSample] = {}  # in the order in which they were admitted
        self._finishes: list[tuple[int, int]] = []  # heap: the count, and the number; with those that were preempted
        self._offset = 0  # sum over samples of cached - start

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[SimulatedSample]:
        """In the order in which they were admitted."""
        return iter(self._samples.values())

    def cached(self, count: int) -> int:
        """Tokens of all contexts."""
        return self._offset + len(self._samples) * count

    def next_count(self) -> int:
        """When the first finishes, or the cache is full if that is sooner. There must be samples."""
        finish = self._finishes[0][0]
        return finish if self._room is None else min(finish, (self._room - self._offset) // len(self._samples))

    def fits(self, tokens: int, count: int) -> bool:
        """Is there room for another context of so many tokens, and for the next step?"""
        return self._room is None or self.cached(count) + tokens + len(self._samples) + 1 <= self._room

    def overflows(self, count: int) -> bool:
        """Is there too little room for the next step?"""
        return self._room is not None and self.cached(count) + len(self._samples) > self._room

    def add(self, sample: SimulatedSample, count: int) -> None:
        sample.start = count
        self._admitted += 1
        self._samples[self._admitted] = sample
        self._offset += sample.cached - count
        heappush(self._finishes, (count + sample.remaining, self._admitted))

    def take_finished(self, count: int) -> SimulatedSample | None:
        """One that has all its tokens at this count, which no finish was before; those admitted first come first."""
        if not self._finishes or self._finishes[0][0] != count:
            return None
        sample = self._samples.pop(heappop(self._finishes)[1])
        self._leave(sample)
        return sample

    def take_latest(self) -> SimulatedSample:
        """The one that was admitted last."""
        _, sample = self._samples.popitem()
        self._leave(sample)
        return sample

    def clear(self) -> None:
        self._samples.clear()
        self._finishes.clear()
        self._offset = 0

    def _leave(self, sample: SimulatedSample) -> None:
        self._offset -= sample.cached - sample.start
        while self._finishes and self._finishes[0][1] not in self._samples:
            heappop(self._finishes)
