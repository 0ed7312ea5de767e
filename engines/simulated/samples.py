"""Simulated samples: a length and no content, and which version sampled which part of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class SimulatedSample:
    """One sample on its way. runs: (version, tokens) of each stretch that one version sampled.

    cached: tokens of its prompt and of what it had when it got its slot, at least 1; remaining: tokens it will sample
    from there.
    """

    sample_id: int
    cached: int
    remaining: int
    runs: list[tuple[int, int]] = field(default_factory=list)
    started_at: float | None = None
    start: int = 0  # the step count at which it got a slot
    preempted: bool = False  # it lost its slot, and waits for another

    def add_run(self, version: int, tokens: int) -> None:
        """A run of no tokens leaves no trace; one under the version of the last run lengthens that."""
        if tokens and self.runs and self.runs[-1][0] == version:
            version, before = self.runs.pop()
            tokens += before
        if tokens:
            self.runs.append((version, tokens))


class Versions:
    """Which version an engine had at each of its decode steps."""

    def __init__(self, version: int) -> None:
        self._changed_at, self._versions = [0], [version]

    def change(self, version: int, count: int) -> None:
        """From the step after this count on, which is never less than the last one."""
        if self._changed_at[-1] == count:
            self._changed_at.pop(), self._versions.pop()
        self._changed_at.append(count)
        self._versions.append(version)

    def between(self, begun: int, until: int) -> Iterator[tuple[int, int]]:
        """(version, steps) from one count to another, in order."""
        if self._changed_at[-1] <= begun:
            yield self._versions[-1], until - begun
            return
        place = bisect_right(self._changed_at, begun) - 1
        for version, end in zip(self._versions[place:], [*self._changed_at[place + 1 :], until], strict=True):
            yield version, end - begun
            begun = end
