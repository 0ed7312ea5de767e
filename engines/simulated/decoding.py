"""Continuous batching as events: a pure state machine that a clock drives from one finish to the next.

All running samples advance by one token per decode step, so one counter of steps serves them all: a sample that starts
at count k with r tokens to go finishes at count k + r, and between two events nothing but time and the counter moves.
`harness.cost_model.cost` says how long a step lasts. New samples join, and the engine stops, between two steps
only. The prompts of those that join are prefilled in the next step, at whose end they have their first token: before
what the others do, who wait (SGLang), or beside it, as far as a step has tokens left (vLLM 0.32,
v1/core/sched/scheduler.py: running samples come first, and the prompt that ends the tokens goes on in the next step).

The KV cache may have limited room. Then samples are admitted and preempted as by vLLM (Kwon et al., "Efficient memory
management for large language model serving with PagedAttention", arXiv 2309.06180, section 4.5, recomputation): a
sample is admitted as soon as its context fits, whatever it will need later; when the contexts outgrow the room, those
that were admitted last lose their cache and wait before all others, until their context fits and is prefilled again.
SGLang 0.5 retracts those with the fewest new tokens, which are mostly the same.

Where prefixes are cached, running samples of a group share its prompt: one fills it, and it takes room once.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from harness.cost_model.cost import SAME_STEP, DecodeCost


@dataclass(slots=True)
class SimulatedSample:
    """One sample on its way. runs: (version, tokens) of each stretch that one version sampled; those of earlier turns,
    `closed` of them, stay as they are.

    cached: tokens of its prompt and of what it had when it got its slot, at least 1; remaining: tokens it will sample
    from there; kept: of `cached`, those whose keys and values are there before it gets a slot, from its last turn or
    from a prefill that goes on; shared: of `cached`, the prompt of its group, equally many for all of it.
    """

    sample_id: int
    cached: int
    remaining: int
    runs: list[tuple[int, int]] = field(default_factory=list)
    started_at: float | None = None
    first_token_at: float = math.nan
    start: int = 0  # the step count at which it got a slot
    closed: int = 0
    kept: int = 0
    limit: int | None = None  # tokens of its turn that it may have, where its request says so
    begun: bool = False  # it waits for a slot again, or for the rest of its prefill
    group: int = 0
    shared: int = 0
    cut: bool = False  # it ends before its time

    def add_run(self, version: int, tokens: int) -> None:
        """A run of no tokens leaves no trace; one under the version of the last run lengthens that."""
        if tokens and len(self.runs) > self.closed and self.runs[-1][0] == version:
            version, before = self.runs.pop()
            tokens += before
        if tokens:
            self.runs.append((version, tokens))


class Versions:
    """The policy version that an engine had at each of its decode steps."""

    def __init__(self, version: int) -> None:
        self._changed_at, self._versions = [0], [version]

    def change(self, version: int, count: int) -> None:
        """Set the version of all steps after this count, which is never less than the last one."""
        if self._changed_at[-1] == count:
            self._changed_at.pop(), self._versions.pop()
        self._changed_at.append(count)
        self._versions.append(version)

    @property
    def latest(self) -> tuple[int, int]:
        """The last count at which it changed, and what to."""
        return self._changed_at[-1], self._versions[-1]

    def between(self, begun: int, until: int) -> Iterator[tuple[int, int]]:
        """(version, steps) from one count to another, in order."""
        if self._changed_at[-1] <= begun:
            yield self._versions[-1], until - begun
            return
        first, last = bisect_right(self._changed_at, begun) - 1, bisect_left(self._changed_at, until)
        for version, end in zip(self._versions[first:last], [*self._changed_at[first + 1 : last], until], strict=True):
            yield version, end - begun
            begun = end


class RunningSamples:
    """The samples that hold a slot. room: tokens that the cache holds, None for no limit; sharing: samples of a group
    hold its prompt together. `count` is the engine's decode steps so far.

    A step makes every context longer by a token, and all of them must fit. It may begin only if they will.
    """

    def __init__(self, room: int | None, *, sharing: bool = False) -> None:
        self._room, self._sharing = room, sharing
        self._admitted = 0  # so many samples, ever; numbers them
        self._samples: dict[int, SimulatedSample] = {}  # in the order in which they were admitted
        self._finishes: list[tuple[int, int]] = []  # heap: the count, and the number; with those that were preempted
        self._offset = 0  # sum over samples of cached - start
        self._groups: dict[int, int] = {}  # samples of each
        self._saved = 0  # tokens that are held once, and counted for more than one sample

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[SimulatedSample]:
        """Samples in the order of their admission."""
        return iter(self._samples.values())

    def cached(self, count: int) -> int:
        """Tokens of all contexts."""
        return self._offset + len(self._samples) * count

    def next_count(self) -> int:
        """Step count at which the first sample finishes, or the cache is full if that is sooner. There must be
        samples."""
        finish = self._finishes[0][0]
        if self._room is None:
            return finish
        return min(finish, (self._room + self._saved - self._offset) // len(self._samples))

    def prefix(self, sample: SimulatedSample) -> int:
        """Tokens of a sample's context that are in the cache for another one."""
        return sample.shared if self._sharing and sample.group in self._groups else 0

    def fits(self, sample: SimulatedSample, count: int) -> bool:
        """Whether there is room for the context of another sample, and for the next step."""
        if self._room is None:
            return True
        held = self.cached(count) - self._saved + sample.cached - self.prefix(sample)
        return held + len(self._samples) + 1 <= self._room

    def overflows(self, count: int) -> bool:
        """Whether there is too little room for the next step."""
        return self._room is not None and self.cached(count) - self._saved + len(self._samples) > self._room

    def add(self, sample: SimulatedSample, count: int) -> None:
        """Admit a sample after `count` steps."""
        sample.start = count
        self._admitted += 1
        self._samples[self._admitted] = sample
        self._offset += sample.cached - count
        if self._sharing:
            self._saved += self.prefix(sample)
            self._groups[sample.group] = self._groups.get(sample.group, 0) + 1
        heappush(self._finishes, (count + sample.remaining, self._admitted))

    def cut(self, sample_ids: Collection[int], count: int) -> None:
        """Let these samples end at this step count, or with their first token if that comes later."""
        for number, sample in self._samples.items():
            last = max(count, sample.start + 1)
            if sample.sample_id in sample_ids and last < sample.start + sample.remaining:
                sample.remaining, sample.cut = last - sample.start, True
                heappush(self._finishes, (last, number))

    def take_finished(self, count: int) -> SimulatedSample | None:
        """Take out a sample that has all its tokens at this count, which no finish was before; those admitted first
        come first."""
        if not self._finishes or self._finishes[0][0] != count:
            return None
        sample = self._samples.pop(heappop(self._finishes)[1])
        self._leave(sample)
        return sample

    def take_latest(self) -> SimulatedSample:
        """Take out the sample that was admitted last."""
        _, sample = self._samples.popitem()
        self._leave(sample)
        return sample

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()
        self._finishes.clear()
        self._groups.clear()
        self._offset = self._saved = 0

    def _leave(self, sample: SimulatedSample) -> None:
        self._offset -= sample.cached - sample.start
        if self._sharing:
            self._groups[sample.group] -= 1
            if not self._groups[sample.group]:
                del self._groups[sample.group]
            self._saved -= self.prefix(sample)
        while self._finishes and self._finishes[0][1] not in self._samples:
            heappop(self._finishes)


@dataclass(slots=True)
class Prefill:
    """The prefill of the step after this count: tokens, seconds of these by themselves, and those by which it gets
    longer; left: tokens that it may have besides."""

    count: int = -1
    left: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    joined_s: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Prefill so many more."""
        self.tokens, self.left, self.seconds = self.tokens + tokens, self.left - tokens, self.seconds + seconds


class Stepping(ABC):
    """The steps of one engine and their times, in seconds on the caller's clock, whatever its samples are. None of its
    calls goes back.

    Its attributes are many: the state at the last event, from which the next one follows.
    """

    def __init__(self, cost: DecodeCost, slots: int) -> None:
        self.slots = slots
        self.admitting = True
        self.stopped = False
        self._cost = cost
        self._count = 0  # decode steps done at `_since`
        self._since = 0.0  # the time of the last event
        self._decoding_from = 0.0  # when prefill ends and the next decode step begins
        self._owed_s = 0.0  # of a stopped engine: prefill to do when it goes on
        self._cold = False  # the cache is lost
        self._join_at: int | None = None  # the count at which it looks at what waits, and at its cache
        self._stop_at: int | None = None
        self._prefill = Prefill()

    @property
    @abstractmethod
    def running(self) -> int:
        """Samples that hold a slot."""

    @abstractmethod
    def advance(self, now: float) -> None:
        """Let everything happen that is due by `now`."""

    @abstractmethod
    def _cached(self) -> int:
        """Tokens of the contexts of all that runs."""

    @abstractmethod
    def _retire(self) -> None:
        """Take out what has all its tokens."""

    @abstractmethod
    def _preempt(self) -> None:
        """Let the latest samples wait again until the next step fits. One sample alone always does, and none of the
        preempted fits again at once."""

    @abstractmethod
    def _all_wait_again(self) -> None:
        """Let all that runs wait before all others, in its order, and without a cache."""

    @abstractmethod
    def _may_admit(self) -> bool:
        """Whether the first that waits may join: those behind it wait for it. While draining, only what has begun
        may."""

    @abstractmethod
    def _first_waiting(self) -> tuple[int, int]:
        """Tokens of the first that waits, and those of them that are in the cache."""

    @abstractmethod
    def _prefilled(self, tokens: int, *, whole: bool) -> None:
        """Have so many tokens of the first that waits in the cache; where that is the whole of it, it gets a slot."""

    def steps(self, now: float) -> int:
        """Decode steps so far, that which is under way included."""
        return self._count if self.stopped else self._boundary(now)

    def stop(self, now: float) -> None:
        """Stop after the step that is under way, and admit nothing from now on; `stopped` says when it has."""
        self.advance(now)
        self.admitting = False
        if not self.stopped:
            self._stop_at = self._boundary(now)
            self._arrive(now)

    def drain(self, now: float) -> None:
        """Start nothing new, and let what has begun finish, even if it was stopped before: see `drained`."""
        self.resume(now, admitting=False)

    def resume(self, now: float, *, admitting: bool = True) -> None:
        """Go on, after the prefill of what lost its cache or was about to be prefilled."""
        self.advance(now)
        self.admitting, self._stop_at = admitting, None
        if self.stopped:
            self.stopped = False
            self._since, self._decoding_from = now, now + self._owed_s
        self._join(now)

    def _time_of(self, count: int) -> float:
        """Time at which this many steps are done, should nothing happen before."""
        if count == self._count:
            return self._since
        return self._decoding_from + self._cost.steps(count - self._count, self.running, self._cached())

    def _boundary(self, now: float) -> int:
        """The count after the step that is under way; an idle engine is between two steps all the time."""
        if not self.running:
            return self._count
        samples, cached = self.running, self._cached()
        if now - self._since <= SAME_STEP * self._cost.steps(1, samples, cached):
            return self._count
        return self._count + self._cost.steps_begun(now - self._decoding_from, samples, cached)

    def _join(self, now: float) -> None:
        """Look after the step that is under way at what waits, and at the cache."""
        if not self.stopped:
            self._join_at = self._boundary(now)
            self._arrive(now)

    def _arrive(self, now: float) -> None:
        """Handle what is to happen at once; what comes later is an event. A boundary that rounding puts an ulp before
        now is now: nothing that is asked for happens before it was."""
        count = min(count for count in (self._join_at, self._stop_at) if count is not None)
        if count == self._count or self._time_of(count) <= now:
            self._reach(count, max(now, self._since))

    def _reach(self, count: int, at: float) -> None:
        """The event at this count: retire, then stop, or preempt and admit."""
        self._count, self._since = count, at
        self._decoding_from = max(self._decoding_from, at)
        self._retire()
        self._join_at = None
        if self._stop_at == count:
            self._stop_at, self.stopped = None, True
            self._owed_s = self._decoding_from - at
        else:
            self._refill()

    def _refill(self) -> None:
        """Preempt, or admit what waits."""
        self._preempt()
        if self._cold:
            self._cold, self._decoding_from, self._prefill = False, self._since, Prefill()
            self._all_wait_again()
        self._admit()

    def _admit(self) -> None:
        """Admit what waits, in order, while there are slots, room, and tokens of the next step. Who comes when nothing
        runs keeps nobody waiting, and is prefilled at once."""
        cost, step = self._cost, self._prefill
        if step.count != self._count:
            if not self._may_admit():
                return
            left = math.inf if cost.step_tokens is None else cost.step_tokens - self.running
            step = self._prefill = Prefill(self._count, left)
        while step.left > 0 and self._may_admit():
            tokens, kept = self._first_waiting()
            some = int(min(tokens - kept, step.left)) if self.running else tokens - kept
            step.add(some, cost.prefill(kept + some) - (cost.prefill(kept) if kept else 0.0))
            self._prefilled(kept + some, whole=kept + some == tokens)
        before_s, step.joined_s = step.joined_s, cost.joined_s(step.seconds, step.tokens, self.running)
        self._decoding_from += step.joined_s - before_s
        if step.left <= 0 and self._may_admit():
            self._join_at = self._count + 1


class Decoding(Stepping):
    """The decoding of one engine. Every call first moves on to its time. Its attributes are those of `Stepping`, and
    seven more."""

    def __init__(self, cost: DecodeCost, *, slots: int, version: int = 0) -> None:
        super().__init__(cost, slots)
        self.finished: list[tuple[SimulatedSample, float]] = []
        """Samples that are done, with the time; the caller takes them out."""
        self.waiting: deque[SimulatedSample] = deque()  # those that have begun come first
        self.preemptions = 0
        self.recomputed_tokens = 0  # lost by preemptions
        self._running = RunningSamples(cost.kv_tokens, sharing=cost.prefix_caching)
        self._versions = Versions(version)
        self._joined: list[SimulatedSample] = []  # since the last step, and without a token

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def drained(self) -> bool:
        """Whether nothing that has begun is unfinished."""
        return not self._running and not (self.waiting and self.waiting[0].begun)

    def next_event(self) -> float | None:
        """Time at which something happens by itself: a sample finishes or is preempted, or the engine admits or
        stops."""
        if self.stopped or not self._running:
            return None
        return self._time_of(self._next_count())

    def advance(self, now: float) -> None:
        while self._running and not self.stopped:
            count = self._next_count()
            due = self._time_of(count)
            if due > now:
                break
            self._reach(count, due)

    def _reach(self, count: int, at: float) -> None:
        if self._joined and count > self._count:
            first_token_at = self._time_of(self._count + 1)
            for sample in self._joined:
                sample.first_token_at = first_token_at
            self._joined.clear()
        super()._reach(count, at)

    def submit(self, samples: Sequence[SimulatedSample], now: float) -> None:
        """Queue samples, which join in this order after the step that is under way, as far as there are slots and room.

        Raises ValueError, and takes none, if one would not fit into an empty KV cache.
        """
        self._require_room(samples)
        self.advance(now)
        self.waiting.extend(samples)
        if self._may_admit():
            self._join(now)

    def drop_cache(self, now: float) -> None:
        """Prompts and tokens of running samples are prefilled again, before all others, from the next step on (of a
        stopped engine: when it resumes)."""
        self.advance(now)
        self._cold = True
        for sample in self.waiting:
            sample.kept = 0
        self._join(now)

    def cut(self, sample_ids: Collection[int], now: float) -> None:
        """Let these samples end after the step that is under way; waiting ones at once if they have a token, else with
        their first."""
        self.advance(now)
        self._running.cut(sample_ids, self.steps(now))
        for sample in [sample for sample in self.waiting if sample.sample_id in sample_ids]:
            if sample.runs:
                sample.cut = True
                self.waiting.remove(sample)
                self.finished.append((sample, now))
            elif sample.remaining > 1:
                sample.cut, sample.remaining = True, 1
        self._join(now)

    def load(self, version: int) -> None:
        """Sample tokens of this version from now on. Stopped or idle engines only."""
        self._versions.change(version, self._count)

    def abort(self) -> list[SimulatedSample]:
        """Take everything out of a stopped engine: running samples in the order they joined, then waiting ones."""
        for sample in self._running:
            self._add_runs(sample)
        aborted = [*self._running, *self.waiting]
        for waiting in (self._running, self.waiting, self._joined):
            waiting.clear()
        self._owed_s, self._prefill = 0.0, Prefill()
        return aborted

    def _require_room(self, samples: Iterable[SimulatedSample]) -> None:
        room = self._cost.kv_tokens
        for sample in samples:
            if room is not None and sample.cached + sample.remaining > room:
                raise ValueError(
                    f"sample {sample.sample_id} will have {sample.cached + sample.remaining} tokens, prompt and "
                    f"response, but the KV cache has room for kv_tokens={room}; allow more or shorten responses"
                )

    def _may_admit(self) -> bool:
        if self.stopped or not self.waiting or len(self._running) >= self.slots:
            return False
        first = self.waiting[0]
        return (self.admitting or first.begun) and self._running.fits(first, self._count)

    def _next_count(self) -> int:
        count = self._running.next_count()
        if self._join_at is not None:
            count = min(count, self._join_at)
        if self._stop_at is not None:
            count = min(count, self._stop_at)
        return count

    def _cached(self) -> int:
        return self._running.cached(self._count)

    def _retire(self) -> None:
        while (sample := self._running.take_finished(self._count)) is not None:
            self._add_runs(sample)
            self.finished.append((sample, self._since))

    def _all_wait_again(self) -> None:
        running = list(self._running)
        self._running.clear()
        for sample in reversed(running):
            self._wait_again(sample)

    def _preempt(self) -> None:
        while self._running.overflows(self._count):
            sample = self._running.take_latest()
            self._wait_again(sample)
            self.preemptions += 1
            self.recomputed_tokens += sample.cached

    def _wait_again(self, sample: SimulatedSample) -> None:
        """Let a sample wait before all others, with the tokens that it has, and without a cache."""
        self._add_runs(sample)
        sampled = self._count - sample.start
        if not sampled and not sample.runs:
            self._joined.remove(sample)
        sample.cached += sampled
        sample.remaining -= sampled
        sample.begun, sample.kept = True, 0
        self.waiting.appendleft(sample)

    def _first_waiting(self) -> tuple[int, int]:
        first = self.waiting[0]
        return first.cached, max(first.kept, min(self._running.prefix(first), first.cached - 1))

    def _prefilled(self, tokens: int, *, whole: bool) -> None:
        first = self.waiting[0]
        first.started_at = self._since if first.started_at is None else first.started_at
        first.kept, first.begun = tokens, not whole
        if whole:
            if not first.runs:
                self._joined.append(first)
            self._running.add(self.waiting.popleft(), self._count)

    def _add_runs(self, sample: SimulatedSample) -> None:
        """Add what the sample decoded since it got its slot, a run for each version in that time."""
        for version, tokens in self._versions.between(sample.start, self._count):
            sample.add_run(version, tokens)


def decoded_s(cost: DecodeCost, lengths: Iterable[int], *, prompt: int, slots: int, group_size: int = 1) -> float:
    """Seconds that one engine takes for responses of these lengths, group by group, to prompts of `prompt` tokens, all
    there at once."""
    decoding = Decoding(cost, slots=slots)
    samples = [
        SimulatedSample(number, prompt, length, group=number // group_size, shared=prompt)
        for number, length in enumerate(lengths)
    ]
    decoding.submit(samples, 0.0)
    decoding.advance(math.inf)
    return max(at for _, at in decoding.finished)
