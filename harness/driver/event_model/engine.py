"""One engine that decodes, filled with groups: as `engines.simulated.decoding` decodes, and `harness.workers.rollout`
fills; and the moments of all engines, which the event loop is spared."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from engines.simulated.decoding import Prefill, Stepping, Versions
from harness.runtime.virtual_runtime import VirtualLoop

if TYPE_CHECKING:
    from harness.driver.event_model.job import Job
    from harness.driver.event_model.queue import Wanted

_BITS = 32  # of a heap's entry: the sample; above them the step at which it ends
_MASK = (1 << _BITS) - 1


class Engine(Stepping):
    """One engine: decoding and the feed before it, in one, of samples that are numbers.

    Whatever happens to it happens at the time of the loop. Between two such moments `_plan` goes ahead, finish by
    finish (`_ahead`), to the first at which a group is done, the feed has room that it waits for, or the engine stops,
    admits or preempts; what comes in before is settled by going back.

    Its attributes are many: those of `Stepping`, of the feed, and of the plan.
    """

    def __init__(self, job: Job, role: str, number: int) -> None:
        super().__init__(job.decode[role], job.config.engine.slots)
        self.job, self.role, self.number, self._queue = job, role, number, job.queue
        self.bound, self.above = _MASK, 0  # groups from the one on are not its own yet, nor those before the other
        self.paused = self.asleep = self._taken_back = False
        self.wanted = 0  # groups that it waits for
        self._n, self._room = job.queue.group_size, self._cost.kv_tokens
        decode = self._cost
        self._step_s = [  # of a decode step of so many samples, their contexts aside
            decode.step_s + max(decode.weights(n), n * decode.per_sample_s) for n in range(self.slots + 1)
        ]
        self._heap: list[int] = []
        self._running = self._offset = 0
        self._waiting: deque[int] = deque()  # those that have begun come first
        self._begun: set[int] = set()  # of these: they wait again, or for the rest of their prefill
        self._kept: dict[int, int] = {}  # tokens in the cache of those that wait for the rest
        self._sharing: dict[int, int] | None = {} if decode.prefix_caching else None  # samples of each group that run
        self._saved = 0  # tokens of prompts that are held once, and counted for more than one sample
        self._order: list[int] = []  # of admission
        self._draining = False
        self._ahead: list[tuple[float, int, int]] = []  # finishes that are due no later than the planned moment
        self._base = (0, 0.0, 0.0)
        self.planned = 0  # the number of the plan that holds
        self._special: int | None = None  # step at which the planned moment is, where nothing ends there
        self._completed: list[int] = []
        self._versions = Versions(0)
        self._parts: deque[Wanted] = deque()
        self._share = self._most = 0
        self._wants = self._feeding = False
        self._ended: Callable[[], None] | None = None
        self._on_pause: Callable[[], None] | None = None
        self.busy_since: float | None = None

    @property
    def version(self) -> int:
        """The version of its weights."""
        return self._versions.latest[1]

    @property
    def running(self) -> int:
        return self._running

    @property
    def busy(self) -> int:
        """Samples that it has."""
        return self._running + len(self._waiting)

    # -- the feed

    @property
    def wanted_of(self) -> Wanted:
        """The batches whose groups it waits for."""
        return self._parts[0]

    def begin(self, parts: Sequence[Wanted], share: int, most: int, ended: Callable[[], None]) -> None:
        """Take groups of these batches, one after the other, at most `share` samples at once and `most` at a time;
        ended: is called when all is taken and done."""
        self._parts, self._share, self._most, self._ended = deque(parts), share, most, ended
        self._feeding = True
        self.ask()

    def end(self) -> None:
        """Take no more groups."""
        self._parts.clear()
        self._wants = self._feeding = False
        self._queue.forget(self)

    def ask(self) -> None:
        """Take what there is room for."""
        self.advance(self.job.now)
        self._ask()
        self._plan()

    def _ask(self) -> None:
        queue, n = self._queue, self._n
        while self._parts:
            free = 0 if self._taken_back else min(self.slots, self._most) - self.busy
            self._wants = free < n
            if self._wants:
                return
            self.wanted = min(self._share, free // n * n) // n
            taken = queue.take(self._parts[0], self.wanted, self.bound, self.above)
            if taken is None:
                self._parts.popleft()
            elif not taken:
                queue.wait(self)
                return
            else:
                self.submit(taken)
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._feeding and not self._parts and not self.busy:
            self._feeding = False
            assert self._ended is not None
            self._ended()

    def submit(self, groups: Sequence[int]) -> None:
        """Take these groups in; `ask` follows."""
        now = self.job.now
        self.advance(now)
        self.job.began(groups, self.bound)
        self._add([sample for group in groups for sample in self._of(group)], now)

    def take_over(self, samples: Sequence[int]) -> None:
        """Go on with samples that another engine had."""
        self.advance(self.job.now)
        self._add(samples, self.job.now)
        self._plan()

    def _add(self, samples: Sequence[int], now: float) -> None:
        self._waiting.extend(samples)
        if not self.paused and self.busy_since is None:
            self.busy_since = now
        if self._may_admit():
            self._join(now)

    def hand_over(self) -> list[int]:
        """Let go of all that it has, as it is, once it is stopped. What has ended of a group that goes on elsewhere
        counts by the versions of this engine."""
        self.give_up(carry=True)
        queue, left, self._waiting = self._queue, list(self._waiting), deque()
        for sample in {other for group in {one // self._n for one in left} for other in self._of(group)} - {*left}:
            versions, eldest = self._versions_between(queue.start[sample], queue.end[sample])
            tokens, earlier, oldest = queue.older.get(sample, (0, 0.0, eldest))
            whole = queue.end[sample] - queue.start[sample] + tokens
            queue.older[sample] = (whole, versions + earlier, min(oldest, eldest))
            queue.start[sample] = queue.end[sample] = 0
        return left

    @property
    def _has(self) -> list[int]:
        """Samples that run or wait."""
        return [*(entry & _MASK for entry in self._heap), *self._waiting]

    def _of(self, group: int) -> range:
        return range(group * self._n, (group + 1) * self._n)

    # -- what a schedule asks

    def pause(self, wait: bool, paused: Callable[[], None]) -> None:
        """Stop after the step under way, or, to `wait`, after the last sample; then call `paused`."""
        now = self.job.now
        self.advance(now)
        self._on_pause = paused
        if wait and not self._drained:
            self._draining = True
            self.drain(now)
        else:
            self.stop(now)
        if self.stopped and not self._completed:
            self._tell_paused()
        self._plan()

    def give_up(self, *, carry: bool) -> None:
        """Let all that it has begin again when it goes on; or go on, with the tokens that it has (carry)."""
        again = sorted(self._has)
        if carry:
            self._all_wait_again()
        else:
            self._begin_again(again)
        self._forget(again)

    def put_off(self) -> None:
        """Give all groups that it has, whole, back to the queue."""
        groups = sorted({sample // self._n for sample in self._has})
        self._begin_again([sample for group in groups for sample in self._of(group)])
        self._forget(())
        self._queue.give_back(groups)
        self.job.gave_back(groups)

    def _begin_again(self, samples: Iterable[int]) -> None:
        queue = self._queue
        for sample in samples:
            queue.context[sample], queue.left[sample] = queue.prompt, queue.lengths[sample]
            queue.older.pop(sample, None)

    def _forget(self, waiting: Iterable[int]) -> None:
        """Have no samples but these, which wait; and take none until it goes on."""
        self._taken_back = True
        self._waiting = deque(waiting)
        self._heap.clear()
        self._order.clear()
        self._begun.clear()
        self._kept.clear()
        if self._sharing:
            self._sharing.clear()
        self._running = self._offset = self._saved = 0
        self._owed_s, self._prefill = 0.0, Prefill()

    def go_on(self) -> None:
        """Generate again."""
        now = self.job.now
        self.paused = self._taken_back = False
        self.resume(now)
        if self.busy:
            self.busy_since = now
        if self._wants:
            self._ask()
        self._plan()

    def load(self, version: int, *, keep_cache: bool) -> None:
        """Have new weights: stopped, or idle."""
        self.advance(self.job.now)
        self._close_span()
        self._versions.change(version, self._count)
        if not keep_cache:
            self._cold = True
            self._kept.clear()

    # -- decoding

    @property
    def _drained(self) -> bool:
        return not self._running and not (self._waiting and self._waiting[0] in self._begun)

    def _cached(self) -> int:
        return self._offset + self._running * self._count

    def _enter(self, sample: int) -> None:
        """Count a sample among those that run."""
        self._running += 1
        self._offset += self._queue.context[sample] - self._queue.start[sample]
        if self._sharing is not None:
            group = sample // self._n
            others = self._sharing.get(group, 0)
            self._sharing[group] = others + 1
            self._saved += self._queue.prompt if others else 0

    def _leave(self, sample: int) -> None:
        self._running -= 1
        self._offset -= self._queue.context[sample] - self._queue.start[sample]
        if self._sharing is not None:
            group = sample // self._n
            self._sharing[group] = others = self._sharing[group] - 1
            self._saved -= self._queue.prompt if others else 0

    def _prefix(self, sample: int) -> int:
        """Tokens of a sample's context that are in the cache for another one."""
        return self._queue.prompt if self._sharing and self._sharing.get(sample // self._n) else 0

    def _may_admit(self) -> bool:
        if self.stopped or not self._waiting or self._running >= self.slots:
            return False
        first = self._waiting[0]
        if not (self.admitting or first in self._begun):
            return False
        if self._room is None:
            return True
        held = self._cached() - self._saved + self._queue.context[first] - self._prefix(first)
        return held + self._running + 1 <= self._room

    def _take_first(self) -> int:
        """Take out the sample that ends first, whose end that is."""
        entry, queue = heappop(self._heap), self._queue
        sample = entry & _MASK
        self._leave(sample)
        queue.end[sample] = entry >> _BITS
        group = sample // self._n
        queue.unfinished[group] -= 1
        if not queue.unfinished[group]:
            self._completed.append(group)
        return sample

    def _retire(self) -> None:
        while self._heap and self._heap[0] >> _BITS == self._count:
            self._take_first()

    def _preempt(self) -> None:
        while self._room is not None and self._cached() - self._saved + self._running > self._room:
            sample = self._order.pop()
            entry = (self._queue.start[sample] + self._queue.left[sample]) << _BITS | sample
            if entry in self._heap:  # else it has ended
                self._heap.remove(entry)
                heapify(self._heap)
                self._wait_again(sample)

    def _all_wait_again(self) -> None:
        running = {entry & _MASK for entry in self._heap}
        for sample in reversed(self._order):
            if sample in running:
                running.discard(sample)  # a refused group's samples were admitted before
                self._wait_again(sample)
        self._heap.clear()
        self._order.clear()

    def _wait_again(self, sample: int) -> None:
        queue, count = self._queue, self._count
        begun = queue.start[sample]
        self._leave(sample)
        if count > begun:
            tokens, versions, oldest = queue.older.get(sample, (0, 0.0, self.version))
            more, eldest = self._versions_between(begun, count)
            queue.older[sample] = (tokens + count - begun, versions + more, min(oldest, eldest))
        queue.context[sample] += count - begun
        queue.left[sample] -= count - begun
        self._begun.add(sample)
        self._waiting.appendleft(sample)

    def _first_waiting(self) -> tuple[int, int]:
        first = self._waiting[0]
        tokens = self._queue.context[first]
        return tokens, max(self._kept.get(first, 0), min(self._prefix(first), tokens - 1))

    def _prefilled(self, tokens: int, *, whole: bool) -> None:
        sample = self._waiting[0]
        if not whole:
            self._begun.add(sample)
            self._kept[sample] = tokens
            return
        self._waiting.popleft()
        self._begun.discard(sample)
        self._kept.pop(sample, None)
        self._queue.start[sample] = self._count
        self._enter(sample)
        heappush(self._heap, (self._count + self._queue.left[sample]) << _BITS | sample)
        self._order.append(sample)

    # -- going ahead

    def _plan(self) -> None:
        """Find the next moment that matters, and ask to be woken there."""
        self.planned += 1
        self._base = (self._count, self._since, self._decoding_from)
        wants = self._wants and not self._taken_back
        has_room = min(self.slots, self._most) - self._n - len(self._waiting) if wants else -1
        if self._completed or self._running <= has_room:  # just now
            self.job.moments.wake(self, self._since)
            return
        if self.stopped or not self._running:
            return
        heap, ahead, room, step_s, cached_s = self._heap, self._ahead, self._room, self._step_s, self._cost.per_cached_s
        count, at, begins = self._base
        due = min((of for of in (self._join_at, self._stop_at) if of is not None), default=_MASK)
        admissible = bool(self._waiting) and (self.admitting or self._waiting[0] in self._begun)
        while True:
            running, finish = self._running, heap[0] >> _BITS
            special = due if room is None else min(due, (room + self._saved - self._offset) // running)
            until = min(special, finish)
            if steps := until - count:
                cached = self._offset + running * count + running * (steps - 1) / 2
                at = begins = begins + steps * (step_s[running] + cached * cached_s)
                count = until
            if special < finish:
                self._special = special
                break
            while heap and heap[0] >> _BITS == count:
                ahead.append((at, count, self._take_first()))
            running = self._running
            if self._completed or running <= has_room or admissible or special == count or not running:
                break
        if ahead:
            at_last, self._count, _ = ahead[-1]
            self._since, self._decoding_from = at_last, max(at_last, self._base[2])
        self.job.moments.wake(self, at)

    def advance(self, now: float) -> None:
        """Be where it is now: what was planned for later is undone."""
        ahead, queue = self._ahead, self._queue
        self.planned += 1
        if ahead and ahead[-1][0] > now:
            while ahead and ahead[-1][0] > now:
                _, count, sample = ahead.pop()
                heappush(self._heap, count << _BITS | sample)
                self._enter(sample)
                group = sample // self._n
                if not queue.unfinished[group]:
                    self._completed.remove(group)
                queue.unfinished[group] += 1
            self._count, self._since, self._decoding_from = self._base
            if ahead:
                at, self._count, _ = ahead[-1]
                self._since = self._decoding_from = at
        ahead.clear()
        self._special = None

    def happen(self) -> None:
        """The planned moment has come."""
        now, special = self.job.now, self._special
        self.advance(now)
        if not self.stopped:
            self._reach(self._count if special is None else special, now)
        if self._draining and self._drained:
            self._draining = False
            self.stop(now)
        if not self.busy:
            self._close_span()
        if self._completed:
            for group in self._completed:
                self._note_versions(group)
            done, self._completed = self._completed, []
            self.job.completed(done)
        if self.stopped and self._on_pause is not None:
            self._tell_paused()
        if self._wants:
            self._ask()
        elif not self.busy:
            self._end_if_empty()
        self._plan()

    def _tell_paused(self) -> None:
        self.paused = True
        self._close_span()
        told, self._on_pause = self._on_pause, None
        assert told is not None
        told()

    def _close_span(self) -> None:
        if self.busy_since is not None:
            since, self.busy_since = self.busy_since, None
            self.job.generating_s[self.role] += self.job.now - since

    # -- versions

    def _note_versions(self, group: int) -> None:
        """Note the mean version of a group's samples, and the oldest of its tokens."""
        queue, first = self._queue, group * self._n
        changed, version = self._versions.latest
        if not queue.older and changed <= min(queue.start[first : first + self._n]):
            queue.versions[group], queue.oldest[group] = float(version), version
            return
        total, oldest = 0.0, version
        for sample in range(first, first + self._n):
            start, end = queue.start[sample], queue.end[sample]
            versions, eldest = self._versions_between(start, end) if start < end else (0.0, version)
            before, earlier, most = queue.older.get(sample, (0, 0.0, eldest))
            total += (versions + earlier) / (end - start + before)
            oldest = min(oldest, eldest, most)
        queue.versions[group], queue.oldest[group] = total / self._n, oldest

    def _versions_between(self, start: int, end: int) -> tuple[float, int]:
        """The sum over these steps of their versions, and the oldest."""
        found = list(self._versions.between(start, end))
        return float(sum(version * steps for version, steps in found)), found[0][0]


class Moments:
    """The planned moments of engines: one timer of the loop for all."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._wakes: list[tuple[float, int, Engine, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._ticking = False
        self._number = 0

    def wake(self, engine: Engine, at: float) -> None:
        """Have the planned moment of an engine happen then."""
        self._number += 1
        heappush(self._wakes, (at, self._number, engine, engine.planned))
        if not self._ticking:
            self._set_timer()

    def _set_timer(self) -> None:
        at = self._wakes[0][0]
        if self._timer is None or at < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        """Engines one after the other, as long as nobody else has anything to do."""
        self._timer, self._ticking, wakes, loop = None, True, self._wakes, self._loop
        while wakes:
            at, _, engine, plan = wakes[0]
            if plan != engine.planned:
                heappop(wakes)
            elif at <= loop.time() or loop.passes(at):
                heappop(wakes)
                engine.happen()
            else:
                break
        self._ticking = False
        if wakes:
            self._set_timer()
