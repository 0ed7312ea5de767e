"""Continuous batching as events: a pure state machine that a clock drives from one finish to the next.

All running samples advance by one token per decode step, so one counter of steps serves them all: a sample that starts
at count k with r tokens to go finishes at count k + r, and between two events nothing but time and the counter moves.
A step lasts `step_s + n * step_s_per_sample` with n samples running. New samples join, and the engine stops, between
two steps only. The prompts of those that join are prefilled first, and everybody waits for that: it counts as the first
part of the next step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

_SAME_STEP = 1e-6  # of a step: nearer than this is the same moment, rounded


@dataclass(slots=True)
class SimulatedSample:
    """One sample on its way. runs: (version, tokens) of each stretch that one version sampled.

    cached: tokens of its prompt and of what it had before; remaining: tokens it will sample from there.
    """

    sample_id: int
    cached: int
    remaining: int
    runs: list[tuple[int, int]] = field(default_factory=list)
    started_at: float | None = None
    start: int = 0  # the step count at which it got a slot

    def add_run(self, version: int, tokens: int) -> None:
        """A run of no tokens leaves no trace; one under the version of the last run lengthens that."""
        if tokens and self.runs and self.runs[-1][0] == version:
            version, before = self.runs.pop()
            tokens += before
        if tokens:
            self.runs.append((version, tokens))


class Decoding:
    """Times are seconds on the caller's clock. Every call first moves on to its time; none goes back."""

    def __init__(
        self, *, slots: int, step_s: float, step_s_per_sample: float, prefill_s_per_token: float, version: int = 0
    ) -> None:
        self.slots = slots
        self.admitting = True
        self.stopped = False
        self.finished: list[tuple[SimulatedSample, float]] = []
        """Samples that are done, with the time; the caller takes them out."""
        self.waiting: deque[SimulatedSample] = deque()
        self._running: list[tuple[int, int, SimulatedSample]] = []  # heap by the count at which they finish
        self._step_s, self._per_sample_s, self._prefill_s = step_s, step_s_per_sample, prefill_s_per_token
        self._count = 0  # decode steps done at `_since`
        self._since = 0.0  # the time of the last event
        self._decoding_from = 0.0  # when prefill ends and the next decode step begins
        self._owed_s = 0.0  # of a stopped engine: prefill to do when it goes on
        self._cold = False  # the cache is lost
        self._join_at: int | None = None  # the count at which it looks at what waits, and at its cache
        self._stop_at: int | None = None
        self._uncached = 0  # sum over running samples of cached - start: with n * count, what a cache of all would hold
        self._submitted = 0
        self._changed_at, self._versions = [0], [version]

    @property
    def running(self) -> int:
        return len(self._running)

    def next_event(self) -> float | None:
        """When something happens by itself: a sample finishes, or the engine admits or stops between two steps."""
        if self.stopped or not self._running:
            return None
        return self._time_of(self._next_count())

    def advance(self, now: float) -> None:
        """Let everything happen that is due by `now`."""
        while self._running and not self.stopped:
            count = self._next_count()
            due = self._time_of(count)
            if due > now:
                break
            self._reach(count, due)

    def submit(self, samples: Iterable[SimulatedSample], now: float) -> None:
        """They join, in this order, after the step that is under way, as far as there are slots."""
        self.advance(now)
        self.waiting.extend(samples)
        if self._may_admit():
            self._join(now)

    def stop(self, now: float) -> None:
        """Stop after the step that is under way, and admit nothing from now on; `stopped` says when it has."""
        self.advance(now)
        self.admitting = False
        if not self.stopped:
            self._stop_at = self._boundary(now)
            self._arrive(now)

    def drain(self, now: float) -> None:
        """Start nothing new, and let what runs finish, even if it was stopped before."""
        self.resume(now, admitting=False)

    def resume(self, now: float, *, admitting: bool = True) -> None:
        """Go on, after the prefill of what lost its cache or was about to be prefilled."""
        self.advance(now)
        self.admitting, self._stop_at = admitting, None
        if self.stopped:
            self.stopped = False
            self._since, self._decoding_from = now, now + self._owed_s
        self._join(now)

    def drop_cache(self, now: float) -> None:
        """Prompts and tokens of running samples are prefilled again before the next step (of a stopped engine: when it
        resumes)."""
        self.advance(now)
        self._cold = True
        self._join(now)

    def load(self, version: int) -> None:
        """Tokens sampled from now on are of this version. Stopped or idle engines only."""
        if self._changed_at[-1] == self._count:
            self._changed_at.pop(), self._versions.pop()
        self._changed_at.append(self._count)
        self._versions.append(version)

    def abort(self) -> list[SimulatedSample]:
        """Take everything out of a stopped engine: running samples in the order they joined, then waiting ones."""
        running = [sample for _, _, sample in sorted(self._running, key=lambda entry: entry[1])]
        for sample in running:
            self._add_runs(sample)
        aborted = [*running, *self.waiting]
        self._running.clear()
        self.waiting.clear()
        self._uncached, self._owed_s = 0, 0.0
        return aborted

    def _may_admit(self) -> bool:
        return self.admitting and not self.stopped and bool(self.waiting) and len(self._running) < self.slots

    def _step(self) -> float:
        return self._step_s + len(self._running) * self._per_sample_s

    def _time_of(self, count: int) -> float:
        """When this many steps are done, should nothing happen before."""
        if count == self._count:
            return self._since
        return self._decoding_from + (count - self._count) * self._step()

    def _boundary(self, now: float) -> int:
        """The count after the step that is under way; an idle engine is between two steps all the time."""
        step = self._step()
        if not self._running or now - self._since <= _SAME_STEP * step:
            return self._count
        return self._count + max(1, math.ceil((now - self._decoding_from) / step - _SAME_STEP))

    def _next_count(self) -> int:
        count = self._running[0][0]
        if self._join_at is not None:
            count = min(count, self._join_at)
        if self._stop_at is not None:
            count = min(count, self._stop_at)
        return count

    def _join(self, now: float) -> None:
        """Look after the step that is under way at what waits, and at the cache."""
        if not self.stopped:
            self._join_at = self._boundary(now)
            self._arrive(now)

    def _arrive(self, now: float) -> None:
        """Handle what is to happen at the present count at once; what comes later is an event."""
        if self._count in (self._join_at, self._stop_at):
            self._reach(self._count, max(now, self._since))

    def _reach(self, count: int, at: float) -> None:
        """The event at this count: retire, then stop or admit."""
        self._count, self._since = count, at
        self._decoding_from = max(self._decoding_from, at)
        while self._running and self._running[0][0] == count:
            _, _, sample = heappop(self._running)
            self._add_runs(sample)
            self._uncached -= sample.cached - sample.start
            self.finished.append((sample, at))
        self._join_at = None
        if self._stop_at == count:
            self._stop_at, self.stopped = None, True
            self._owed_s = self._decoding_from - at
            return
        if self._cold:
            self._cold = False
            self._decoding_from = at + self._prefill_s * (self._uncached + len(self._running) * count)
        self._admit(at)

    def _admit(self, at: float) -> None:
        while self._may_admit():
            sample = self.waiting.popleft()
            sample.start = self._count
            sample.started_at = at if sample.started_at is None else sample.started_at
            self._submitted += 1
            heappush(self._running, (self._count + sample.remaining, self._submitted, sample))
            self._uncached += sample.cached - sample.start
            self._decoding_from += sample.cached * self._prefill_s

    def _add_runs(self, sample: SimulatedSample) -> None:
        """What it sampled since it got its slot, a run for each version in that time."""
        if self._changed_at[-1] <= sample.start:
            sample.add_run(self._versions[-1], self._count - sample.start)
            return
        place = bisect_right(self._changed_at, sample.start) - 1
        begun = sample.start
        for version, until in zip(self._versions[place:], [*self._changed_at[place + 1 :], self._count], strict=True):
            sample.add_run(version, until - begun)
            begun = until
