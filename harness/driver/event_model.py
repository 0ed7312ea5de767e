"""The fast event model: the schedule's own file over fronts that keep no queue, no rows and no records, so that a job
of thousands of samples takes milliseconds where `simulate` takes seconds. Engines decode as
`engines.simulated.decoding` does, the same lengths at the same seed; an engine goes at once to its next moment that
anybody waits for.

What it does not cover (`not_covered`) is left to `simulate`, and the result says so.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from engines.simulated.passes import scoring_s, training_s
from harness.checks.layout import device_roles
from harness.config import CostConfig, JobConfig
from harness.config.compose import make_schedule
from harness.config.placement import Placement, resolve_split
from harness.config.transports import transport_of
from harness.cost_model.cost import SAME_STEP, DecodeCost, offload_s, reload_s, transfer_times
from harness.cost_model.job_cost import simulated_cost
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.transfer import sender_links
from harness.driver.build import fair_share
from harness.driver.observer import IterationListener
from harness.driver.session import simulate
from harness.metrics.timeline import clip
from harness.rl.advantages import needs_whole_batch
from harness.runtime.virtual_runtime import VirtualLoop, infrequent_gc
from harness.workers.turns import PlacedTurns, Turns
from schedules import Schedule
from schedules.base import gather
from schedules.protocol import PauseMode

_BITS = 32  # of a heap's entry: the sample; above them the step at which it ends
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True)
class FastSteps:
    """The iterations of a job, float64 [iterations] each: seconds from one version to the next; of these, those in
    which an engine generated, a mean over engines; those for which the trainer waited for samples; mean lag of the
    samples trained, and the worst of their tokens; those that the slowest group took, from its engine to its end; those
    in which devices that take or give weights do nothing else; by device role those in which its devices work, for
    whatever role. dropped: samples, as stale or refused. not_covered: why the
    schedule's file itself was simulated; "" where the event model was enough."""

    seconds: NDArray[np.float64]
    generate_s: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    lag_mean: NDArray[np.float64]
    lag_worst: NDArray[np.float64]
    longest_s: NDArray[np.float64]
    exposed_s: NDArray[np.float64]
    busy_s: Mapping[str, NDArray[np.float64]]
    dropped: int = 0
    not_covered: str = ""


def not_covered(config: JobConfig, schedule: Schedule, placement: Placement) -> str:
    """The parts of a job that the event model does not know; "" where it knows all."""
    rollout_shares = len(placement.roles_on(placement.devices["rollout"][0])) > 1
    reasons = {
        f"order={schedule.order}": schedule.order not in ("fifo", "completion"),
        "a critic": config.algorithm.has_critic,
        "groups that are refused and dealt again": config.refills,
        "turns with an environment": config.cost.turns is not None,
        "prompts that groups share, or prefill beside decoding": config.cost.prefix_caching
        or config.cost.step_tokens is not None,
        "a limit on how long samples take": config.engine.sample_limit_s is not None,
        "engines on devices of others": rollout_shares and not schedule.colocated,
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def fast_steps(config: JobConfig, seed: int) -> FastSteps:
    """Iterations of a job that was admitted, as `simulate` has them at this seed. Raises ConfigError as `make_schedule`
    and `simulated_cost` do, Deadlock as `simulate`."""
    schedule = make_schedule(config)
    placement = resolve_split(config.schedule.split, config.cluster.devices, device_roles(config))
    if reason := not_covered(config, schedule, placement):
        return replace(simulated_steps(config, seed), not_covered=reason)
    job = _Job(config, schedule, placement, simulated_cost(config, placement), seed)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, infrequent_gc():
        runner.run(job.run())
    return job.steps()


def simulated_steps(config: JobConfig, seed: int) -> FastSteps:
    """The same of `simulate`."""
    every: list[Mapping[str, float]] = []
    recorder = simulate(
        config, seed, lambda session: session.recorder.listeners.append(IterationListener(every.append))
    )
    timeline = recorder.timeline
    spans = [(span.start, span.end) for span in timeline.spans if span.kind == "generate"]
    engines = sum(role == "rollout" for role, _ in timeline.placement)
    windows = [timeline.window(iteration) for iteration in timeline.iteration_ends]

    def each(name: str) -> NDArray[np.float64]:
        return np.array([metrics[name] for metrics in every])

    longest = np.zeros(len(every))
    for sample in recorder.samples():
        if sample.trained_iteration is not None and sample.finished_at and sample.started_at is not None:
            took = sample.finished_at - sample.started_at
            longest[sample.trained_iteration] = max(longest[sample.trained_iteration], took)
    seconds = each("time/iteration_s")

    dropped = sum(value for name, value in every[-1].items() if name.startswith("ledger/dropped"))
    return FastSteps(
        seconds,
        np.array([sum(end - start for start, end in clip(spans, window)) / engines for window in windows]),
        each("time/wait_for_samples_s"),
        each("staleness/mean"),
        each("staleness/max"),
        longest,
        each("time/weight_sync_exposed_s"),
        {role: seconds * (1 - each(f"idle/{role}")) for role in ("rollout", "actor")},
        int(dropped),
    )


def difference(config: JobConfig, seed: int) -> float:
    """How far the event model is from the schedule's file: the largest difference of the end of an iteration, of the
    seconds of a mean iteration."""
    fast, own = (np.cumsum(found.seconds) for found in (fast_steps(config, seed), simulated_steps(config, seed)))
    return float(np.abs(fast - own).max() * len(own) / own[-1])


# -- engines


class _Engine:
    """One engine: `Decoding` and the feed before it, in one.

    Whatever happens to it happens at the time of the loop. Between two such moments `_plan` goes ahead, finish by
    finish (`_ahead`), to the first at which a group is done, the feed has room that it waits for, or the engine stops,
    admits or preempts; what comes in before is settled by going back.

    Its attributes are many: those of decoding, of the feed, and of the plan.
    """

    def __init__(self, job: _Job, number: int) -> None:
        self.job, self.number = job, number
        self.bound = _MASK  # groups from here on are not its own yet
        self.paused = self.asleep = False
        self.queued = 0  # groups that it waits for
        self._cost, self._slots, self._n = job.decode, job.slots, job.group_size
        self._room = self._cost.kv_tokens
        self._heap: list[int] = []
        self._running = self._count = self._offset = 0
        self._since = self._from = self._owed = 0.0
        self._waiting: deque[int] = deque()
        self._preempted: set[int] = set()
        self._order: list[int] = []  # of admission
        self._admitting, self._stopped, self._cold, self._draining = True, False, False, False
        self._join_at: int | None = None
        self._stop_at: int | None = None
        self._ahead: list[tuple[float, int, int]] = []  # finishes that are due no later than the planned moment
        self._base = (0, 0.0, 0.0)
        self._planned = 0  # the number of the plan that holds
        self._special: int | None = None  # step at which the planned moment is, where nothing ends there
        self._completed: list[int] = []
        self._changes: list[tuple[int, int]] = [(0, 0)]
        self._parts: deque[int | None] = deque()
        self._share = self._most = 0
        self._wants = self._feeding = False
        self._ended: Callable[[], None] | None = None
        self._on_stop: Callable[[], None] | None = None
        self.busy_since: float | None = None

    @property
    def version(self) -> int:
        return self._changes[-1][1]

    @property
    def busy(self) -> int:
        """Samples that it has."""
        return self._running + len(self._waiting)

    # -- the feed

    def begin(self, parts: Sequence[int | None], share: int, most: int, ended: Callable[[], None]) -> None:
        """Take groups of these batches (None: of any), at most `share` samples at once and `most` at a time; ended: is
        called when all is taken and done."""
        self._parts, self._share, self._most, self._ended = deque(parts), share, most, ended
        self._feeding = True
        self.ask()

    def ask(self) -> None:
        """Take what there is room for."""
        self._settle(self.job.now)
        self._ask()
        self._plan()

    def _ask(self) -> None:
        job, n = self.job, self._n
        while self._parts:
            free = min(self._slots, self._most) - self.busy
            self._wants = free < n
            if self._wants:
                return
            wanted = min(self._share, free // n * n) // n
            taken = job.take(self._parts[0], wanted, self.bound)
            if taken is None:
                self._parts.popleft()
            elif not taken:
                self.queued = wanted
                job.wait(self)
                return
            else:
                self.submit(taken)
        self._end_if_empty()

    @property
    def wanted_of(self) -> int | None:
        """The batch whose groups it waits for; None: of any."""
        return self._parts[0]

    def _end_if_empty(self) -> None:
        if self._feeding and not self._parts and not self.busy:
            self._feeding = False
            assert self._ended is not None
            self._ended()

    def submit(self, groups: range) -> None:
        """Take these groups in; `ask` follows."""
        now = self.job.now
        self._settle(now)
        for group in groups:
            self._waiting.extend(range(group * self._n, (group + 1) * self._n))
        if not self.paused and self.busy_since is None:
            self.busy_since = now
        if self._may_admit():
            self._join(now)

    # -- what a schedule asks

    def stop(self, stopped: Callable[[], None], mode: PauseMode) -> None:
        """Stop after the step under way, or, with `wait`, after the last sample; then call `stopped`."""
        now = self.job.now
        self._settle(now)
        self._on_stop = stopped
        if mode == "wait" and not self._drained:
            self._draining = True
            self._resume(now, admitting=False)
        else:
            self._stop(now)
        if self._stopped and not self._completed:
            self._tell_stopped()
        self._plan()

    def give_up(self) -> None:
        """Let all that it has begin again when it goes on."""
        again = sorted([*(entry & _MASK for entry in self._heap), *self._waiting])
        job = self.job
        for sample in again:
            job.context[sample], job.left[sample] = job.prompt, job.lengths[sample]
            job.older.pop(sample, None)
        self._waiting = deque(again)
        self._heap.clear()
        self._order.clear()
        self._preempted.clear()
        self._running = self._offset = 0
        self._owed = 0.0

    def resume(self) -> None:
        now = self.job.now
        self._settle(now)
        self.paused = False
        self._resume(now, admitting=True)
        if self.busy:
            self.busy_since = now
        self._plan()

    def load(self, version: int, *, keep_cache: bool) -> None:
        """Have new weights: stopped, or idle."""
        self._settle(self.job.now)
        self._close_span()
        if self._changes[-1][0] == self._count:
            self._changes.pop()
        self._changes.append((self._count, version))
        self._cold = self._cold or (not keep_cache and self._running > 0)

    # -- decoding: as engines/simulated/decoding.py, where each step is explained

    @property
    def _drained(self) -> bool:
        return not self._running and not (self._waiting and self._waiting[0] in self._preempted)

    def _stop(self, now: float) -> None:
        self._admitting = False
        if not self._stopped:
            self._stop_at = self._boundary(now)
            self._arrive(now)

    def _resume(self, now: float, *, admitting: bool) -> None:
        self._admitting, self._stop_at = admitting, None
        if self._stopped:
            self._stopped = False
            self._since, self._from = now, now + self._owed
        self._join(now)

    def _join(self, now: float) -> None:
        if not self._stopped:
            self._join_at = self._boundary(now)
            self._arrive(now)

    def _arrive(self, now: float) -> None:
        count = min(count for count in (self._join_at, self._stop_at) if count is not None)
        if count == self._count or self._time_of(count) <= now:
            self._reach(count, max(now, self._since))

    def _boundary(self, now: float) -> int:
        if not self._running:
            return self._count
        samples, cached = self._running, self._offset + self._running * self._count
        if now - self._since <= SAME_STEP * self._cost.steps(1, samples, cached):
            return self._count
        return self._count + self._cost.steps_begun(now - self._from, samples, cached)

    def _time_of(self, count: int) -> float:
        if count == self._count:
            return self._since
        cached = self._offset + self._running * self._count
        return self._from + self._cost.steps(count - self._count, self._running, cached)

    def _may_admit(self) -> bool:
        if self._stopped or not self._waiting or self._running >= self._slots:
            return False
        first = self._waiting[0]
        if not (self._admitting or first in self._preempted):
            return False
        if self._room is None:
            return True
        return self._offset + self._running * self._count + self.job.context[first] + self._running + 1 <= self._room

    def _reach(self, count: int, at: float) -> None:
        self._count, self._since, self._from = count, at, max(self._from, at)
        heap, job = self._heap, self.job
        while heap and heap[0] >> _BITS == count:
            sample = heappop(heap) & _MASK
            self._running -= 1
            self._offset -= job.context[sample] - job.start[sample]
            self._note_finish(sample, count)
        self._join_at = None
        if self._stop_at == count:
            self._stop_at, self._stopped = None, True
            self._owed = self._from - at
            return
        if self._room is not None:
            self._preempt()
        if self._cold:
            self._cold = False
            contexts = (job.context[s] + count - job.start[s] for s in (entry & _MASK for entry in heap))
            self._from = at + sum(map(self._cost.prefill, contexts))
        self._admit()

    def _note_finish(self, sample: int, count: int) -> None:
        job = self.job
        job.end[sample] = count
        group = sample // self._n
        job.unfinished[group] -= 1
        if not job.unfinished[group]:
            self._completed.append(group)

    def _preempt(self) -> None:
        job, room, count = self.job, self._room, self._count
        assert room is not None
        while self._offset + self._running * count + self._running > room:
            sample = self._order.pop()
            entry = (job.start[sample] + job.left[sample]) << _BITS | sample
            if entry not in self._heap:
                continue  # it has ended
            self._heap.remove(entry)
            heapify(self._heap)
            self._running -= 1
            self._offset -= job.context[sample] - job.start[sample]
            sampled = count - job.start[sample]
            tokens, versions, oldest = job.older.get(sample, (0, 0.0, self.version))
            more, eldest = self._versions(job.start[sample], count)
            job.older[sample] = (tokens + sampled, versions + more, min(oldest, eldest))
            job.context[sample] += sampled
            job.left[sample] -= sampled
            self._preempted.add(sample)
            self._waiting.appendleft(sample)

    def _admit(self) -> None:
        job, waiting, count, heap, preempted = self.job, self._waiting, self._count, self._heap, self._preempted
        context, start, left, prompt, prefill_s = job.context, job.start, job.left, job.prompt, job.prefill_s
        running, offset, begins = self._running, self._offset, self._from
        room = math.inf if self._room is None else self._room
        most = 0 if self._stopped else min(self._slots, running + len(waiting))
        while running < most:
            sample = waiting[0]
            tokens = context[sample]
            if offset + running * count + tokens + running + 1 > room or not (self._admitting or sample in preempted):
                break
            waiting.popleft()
            start[sample] = count
            running += 1
            offset += tokens - count
            heappush(heap, (count + left[sample]) << _BITS | sample)
            begins += prefill_s if tokens == prompt else self._cost.prefill(tokens)
            self._order.append(sample)
            if preempted:
                preempted.discard(sample)
        self._running, self._offset, self._from = running, offset, begins

    # -- going ahead

    def _plan(self) -> None:
        """Find the next moment that matters, and ask to be woken there."""
        self._planned += 1
        self._base = (self._count, self._since, self._from)
        self._special = None
        has_room = min(self._slots, self._most) - self._n - len(self._waiting) if self._wants else -1
        if self._completed or self._running <= has_room:  # just now
            self.job.wake(self, self._since)
            return
        if self._stopped or not self._running:
            return
        job, heap, ahead, n = self.job, self._heap, self._ahead, self._n
        context, start, end, unfinished = job.context, job.start, job.end, job.unfinished
        step_s, cached_s = job.step_s, self._cost.per_cached_s
        count, at, begins = self._base
        running, offset, room = self._running, self._offset, self._room
        joins = [at_count for at_count in (self._join_at, self._stop_at) if at_count is not None]
        limit = min(joins, default=None)
        admissible = bool(self._waiting) and (self._admitting or self._waiting[0] in self._preempted)
        matters = False
        while True:
            finish = heap[0] >> _BITS
            stop = limit
            if room is not None:
                full = (room - offset) // running
                stop = full if stop is None else min(stop, full)
            if stop is not None and stop < finish:
                self._special, steps = stop, stop - count
                if steps:
                    cached = offset + running * count + running * (steps - 1) / 2
                    at = begins + steps * (step_s[running] + cached * cached_s)
                break
            if (steps := finish - count) > 0:
                cached = offset + running * count + running * (steps - 1) / 2
                at = begins = begins + steps * (step_s[running] + cached * cached_s)
                count = finish
            sample = heappop(heap) & _MASK
            ahead.append((at, count, sample))
            end[sample] = count
            running -= 1
            offset -= context[sample] - start[sample]
            group = sample // n
            unfinished[group] -= 1
            if not unfinished[group]:
                self._completed.append(group)
                matters = True
            if matters or running <= has_room or admissible or stop == count or not running:
                if not running or heap[0] >> _BITS != count:
                    break
                matters = True
        self._running, self._offset = running, offset
        if ahead:
            self._count, self._since, self._from = count, ahead[-1][0], max(ahead[-1][0], self._base[2])
        job.wake(self, at)

    def _settle(self, now: float) -> None:
        """Be where it is now: what was planned for later is undone."""
        ahead, job, n = self._ahead, self.job, self._n
        self._planned += 1
        if ahead and ahead[-1][0] > now:
            while ahead and ahead[-1][0] > now:
                _, count, sample = ahead.pop()
                heappush(self._heap, count << _BITS | sample)
                self._running += 1
                self._offset += job.context[sample] - job.start[sample]
                group = sample // n
                if not job.unfinished[group]:
                    self._completed.remove(group)
                job.unfinished[group] += 1
            self._count, self._since, self._from = self._base
            if ahead:
                at, self._count, _ = ahead[-1]
                self._since = self._from = at
        ahead.clear()
        self._special = None

    def happen(self) -> None:
        """The planned moment has come."""
        job, now, special = self.job, self.job.now, self._special
        self._settle(now)
        if not self._stopped:
            self._reach(self._count if special is None else special, now)
        if self._draining and self._drained:
            self._draining = False
            self._stop(now)
        if not self.busy:
            self._close_span()
        if self._completed:
            for group in self._completed:
                self._note_versions(group)
            done, self._completed = self._completed, []
            job.completed(done)
        if self._stopped and self._on_stop is not None:
            self._tell_stopped()
        if self._wants:
            self._ask()
        elif not self.busy:
            self._end_if_empty()
        self._plan()

    def _tell_stopped(self) -> None:
        self.paused = True
        self._close_span()
        told, self._on_stop = self._on_stop, None
        assert told is not None
        told()

    def _close_span(self) -> None:
        if self.busy_since is not None:
            since, self.busy_since = self.busy_since, None
            self.job.generating_s += self.job.now - since

    # -- versions

    def _note_versions(self, group: int) -> None:
        """Note the mean version of a group's samples, and the oldest of its tokens."""
        job, first = self.job, group * self._n
        samples, (changed, version) = range(first, first + self._n), self._changes[-1]
        if not job.older and changed <= min(job.start[first : first + self._n]):
            job.versions[group], job.oldest[group] = float(version), version
            return
        total, oldest = 0.0, version
        for sample in samples:
            tokens = job.end[sample] - job.start[sample]
            versions, eldest = self._versions(job.start[sample], job.end[sample])
            before, earlier, most = job.older.get(sample, (0, 0.0, eldest))
            total += (versions + earlier) / (tokens + before)
            oldest = min(oldest, eldest, most)
        job.versions[group], job.oldest[group] = total / self._n, oldest

    def _versions(self, start: int, end: int) -> tuple[float, int]:
        """The sum over these steps of their versions, and the oldest."""
        place = bisect_right(self._changes, (start, _MASK)) - 1
        total, oldest = 0.0, self._changes[place][1]
        while start < end:
            version = self._changes[place][1]
            place += 1
            until = min(end, self._changes[place][0]) if place < len(self._changes) else end
            total += (until - start) * version
            start = until
        return total, oldest


# -- the job's fronts


class _Frontier:
    """The groups that a role is done with; readers wait for all before one."""

    def __init__(self, groups: int) -> None:
        self._done, self.first = bytearray(groups + 1), 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    def add(self, groups: Sequence[int]) -> None:
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


class _Arrivals:
    """Groups that one reader takes as they come, where the order is that of completion
    (harness/transfer_queue/control/policies.py): of one partition at a time, that whose first one came first."""

    def __init__(self, part_of: Sequence[int]) -> None:
        self.taken = 0
        self.started: dict[int, set[int]] = {}  # groups that are not taken yet, by the bound under which they began
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
        self.started.setdefault(bound, set()).update(groups)

    def drop(self, below: int) -> set[int]:
        """Take out what was begun under this bound or a lower one."""
        dropped = set().union(*(self.started.pop(bound) for bound in list(self.started) if bound <= below))
        for part, ready in self._ready.items():
            self._ready[part] = [one for one in ready if one[1] not in dropped]
        return dropped

    def ask(self, most: int, due: Iterable[tuple[int, int]] = ()) -> asyncio.Future[list[int]]:
        """Up to so many groups, as soon as there is one. due: (bound, n) pairs, bounds ascending: what was begun under
        this bound is among the first n that are ever taken (`precedence` in harness/transfer_queue/control)."""
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
        most, among = self._precedence()
        ready = self._ready
        if among is not None:
            ready = {part: [one for one in its if one[1] in among] for part, its in ready.items()}
        turns = [(its[0][0], part) for part, its in ready.items() if its]
        if not turns:
            return
        _, part = min(turns)
        taken = ready[part][:most]
        groups = [group for _, group in taken]
        self._ready[part] = [one for one in self._ready[part] if one not in taken]
        for started in self.started.values():
            started.difference_update(groups)
        self.taken += len(groups)
        asked, self._asked = self._asked, None
        asked.set_result(groups)

    def _precedence(self) -> tuple[int, set[int] | None]:
        """How many may go at once, and among which they have to be."""
        most = self._most
        for bound, until in self._due:
            waiting = set().union(*(groups for begun, groups in self.started.items() if begun <= bound))
            if waiting:
                slack = until - self.taken - len(waiting)
                if slack < 1:
                    return most, waiting
                most = min(most, slack)
        return most, None


class _Job:
    """`schedules.protocol.Job`, and what its fronts share: many attributes, lists by sample or by group among them."""

    def __init__(
        self, config: JobConfig, schedule: Schedule, placement: Placement, cost: CostConfig, seed: int
    ) -> None:
        algorithm = config.algorithm
        self.config, self.schedule, self.placement, self.cost = config, schedule, placement, cost
        self.iterations, self.batch, self.group_size = config.iterations, algorithm.batch_groups, algorithm.group_size
        self.in_order = schedule.order == "fifo"
        self.slots, self.prompt = config.engine.slots, cost.prompt_tokens
        self.decode = DecodeCost.of(cost)
        self.prefill_s = self.decode.prefill(self.prompt)
        decode = self.decode
        self.step_s = [  # of a decode step of so many samples, their contexts aside
            decode.step_s + max(decode.weights(n), n * decode.per_sample_s) for n in range(self.slots + 1)
        ]
        self._drawn = ResponseLengths.of_job(config, seed)
        self.tokens = np.empty((0, self.group_size), np.int64)
        self.lengths, self.context, self.left = list[int](), list[int](), list[int]()  # by sample, as are those below
        self.start, self.end = list[int](), list[int]()
        self.unfinished, self.versions, self.oldest = list[int](), list[float](), list[int]()  # by group
        self.took = list[float]()  # seconds of each group in its engine
        self.older: dict[int, tuple[int, float, int]] = {}  # of preempted samples: tokens, their versions, the oldest
        # the queue: a partition for each batch, and behind them for groups in the place of those that are dropped
        self.groups = self.iterations * self.batch
        self.admitted, self.closed, self.stale = 0, False, set[int]()
        self._next, self.ends_of = list[int](), list[int]()  # of each part: the group to hand out, the end
        self.part_of = list[int]()  # by group
        self._first = 0  # partition that has some
        self.make_parts(self.groups, self.batch)
        self.queue: dict[_Engine, int] = {}  # engines that wait for groups, and when each asked
        self._asked = 0
        self._wakes: list[tuple[float, int, _Engine, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._ticking = False
        self._number = 0
        engines = len(placement.devices["rollout"]) // config.engine.tensor_parallel
        counts = {role: engines if role == "rollout" else 1 for role in placement.devices}
        self.turns_of = PlacedTurns(placement.devices, counts, limit_s=None)
        rank_devices = config.training.tensor_parallel * config.training.pipeline_parallel
        self.ranks = {role: len(devices) // rank_devices for role, devices in placement.devices.items()}
        links = sender_links(config, schedule.transport, len(placement.devices["actor"]), config.engine.tensor_parallel)
        self.times = transfer_times(cost, schedule.transport, links, self.ranks["actor"])
        self._scored: dict[tuple[Sequence[int], int], float] = {}
        # fronts
        self.engines = [_Engine(self, number) for number in range(engines)]
        self.generated, self.rewarded = _Frontier(self.groups), _Frontier(self.groups)
        self.arrivals, self._tick_of, self._lacking = _Arrivals(self.part_of), 0, dict[int, int]()
        self.prompts, self.rollout = _Prompts(self), _Rollout(self, self.engines)
        self.rewards = _Rewards(self)
        self.host_stages = [self.rewards]
        scoring = [role for role in ("reference", "actor_fwd") if role in placement.devices]
        self.device_stages = [_Scoring(self, role, place) for place, role in enumerate(scoring)]
        self.trainer, self.weights = _Trainer(self), _Weights(self)
        self.ends: list[float] = []
        self.generating_s = 0.0  # of all engines, but for what is under way
        self.generated_s: list[float] = []  # as each iteration ended
        self.worked: dict[str, float] = {}  # seconds, of roles, of loading and of sending
        self.worked_s: list[dict[str, float]] = []  # as each iteration ended

    @property
    def stages(self) -> list[_Rewards | _Scoring]:
        return [*self.host_stages, *self.device_stages]

    @property
    def now(self) -> float:
        return self.loop._now

    @cached_property
    def loop(self) -> VirtualLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop

    async def run(self) -> None:
        await self.schedule.run(self)  # type: ignore[arg-type]  # a Job by shape
        await self.weights.finish()

    def steps(self) -> FastSteps:
        """The iterations as they came out."""
        lags, trained = np.arange(self.iterations), np.array(self.trainer.trained)
        return FastSteps(
            np.diff(np.array(self.ends), prepend=0.0),
            np.diff(np.array(self.generated_s), prepend=0.0) / len(self.engines),
            np.array(self.trainer.waited),
            lags - np.array(self.versions)[trained].mean(axis=1),
            lags - np.array(self.oldest)[trained].min(axis=1),
            np.array(self.took)[trained].max(axis=1),
            self._exposed(),
            {role: self._busy(devices) for role, devices in self.placement.devices.items()},
            len(self.stale) * self.group_size,
        )

    def _busy(self, devices: tuple[int, ...]) -> NDArray[np.float64]:
        """Seconds of work on a role's devices in each iteration."""
        does = [role for role, its in self.placement.devices.items() if its == devices]
        does += ["send"] * ("actor" in does) + ["load"] * ("rollout" in does)
        seconds: NDArray[np.float64] = np.diff(
            [sum(at.get(what, 0.0) for what in does) for at in self.worked_s], prepend=0.0
        )
        if "rollout" in does:
            seconds = seconds + np.diff(self.generated_s, prepend=0.0) / len(self.engines)
        return seconds

    def _exposed(self) -> NDArray[np.float64]:
        """Seconds of transfers, a mean over devices that take part."""
        devices = self.placement.devices
        sent = np.diff([[at.get(what, 0.0) for what in ("load", "send")] for at in self.worked_s], axis=0, prepend=0.0)
        sizes = np.array([len(devices["rollout"]), len(devices["actor"])])
        shared = devices["rollout"] == devices["actor"]
        exposed: NDArray[np.float64] = sent.sum(axis=1) if shared else sent @ sizes / sizes.sum()
        return exposed

    def work(self, role: str, seconds: float) -> Awaitable[None]:
        """Have seconds of work pass, on the devices of a role."""
        self.worked[role] = self.worked.get(role, 0.0) + seconds
        return asyncio.sleep(seconds)

    # -- time

    def wake(self, engine: _Engine, at: float) -> None:
        """Have the planned moment of an engine happen then."""
        self._number += 1
        heappush(self._wakes, (at, self._number, engine, engine._planned))
        if not self._ticking:
            self._set_timer()

    def _set_timer(self) -> None:
        at = self._wakes[0][0]
        if self._timer is None or at < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(at, self._tick)

    def _tick(self) -> None:
        """Engines one after the other, as long as nobody else has anything to do."""
        self._timer, self._ticking, wakes, loop = None, True, self._wakes, self.loop
        while wakes:
            at, _, engine, plan = wakes[0]
            if plan != engine._planned:
                heappop(wakes)
            elif at <= loop._now or loop.passes(at):
                heappop(wakes)
                engine.happen()
            else:
                break
        self._ticking = False
        if wakes:
            self._set_timer()

    # -- the queue

    def make_parts(self, groups: int, size: int) -> None:
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
        self.ends_of += range(first + size, first + groups + size, size)

    def take(self, part: int | None, wanted: int, bound: int) -> range | None:
        """Groups of a partition, or of the oldest that has some, at most so many and below a bound; an empty range
        where none is there yet, None where none will come."""
        if part is None:
            while self._first < len(self._next) and self._next[self._first] == self.ends_of[self._first]:
                self._first += 1
            if self._first == len(self._next) or self._next[self._first] >= self.admitted:
                return None if self.closed else range(0)
            part = self._first
        elif self._next[part] == self.ends_of[part]:
            return None
        first = self._next[part]
        end = min(first + wanted, self.ends_of[part], self.admitted, bound)
        if end <= first:
            return range(0)
        self._next[part] = end
        self.took[first:end] = [-self.now] * (end - first)
        if not self.in_order:
            self.arrivals.begun(range(first, end), bound)
        return range(first, end)

    def wait(self, engine: _Engine) -> None:
        """Have an engine wait for groups."""
        self._asked += 1
        self.queue[engine] = self._asked

    def rebind(self, engines: Sequence[_Engine], below: int) -> None:
        """Give engines another bound; those that wait stand behind others of that bound."""
        served = []
        for engine in engines:
            engine.bound = below
            if engine in self.queue:
                self.queue[engine] = self.queue.pop(engine)
                served += self._hand_out([engine])
        self._go_on(served + self._hand_out(self.queue))

    def serve(self) -> None:
        """Hand groups to engines that wait for them, as far as there are some."""
        self._go_on(self._hand_out(self.queue))

    def _hand_out(self, waiting: Iterable[_Engine]) -> list[tuple[_Engine, range | None]]:
        """Hand groups out: of the lines in which engines that want the same stand
        (harness/transfer_queue/service/waiting.py), the head that asked first is next."""
        lines: dict[tuple[int | None, int, int], deque[_Engine]] = {}
        for engine in waiting:
            lines.setdefault((engine.wanted_of, engine.queued, engine.bound), deque()).append(engine)
        served = []
        open_lines = list(lines.values())
        while open_lines:
            line = min(open_lines, key=lambda line: self.queue[line[0]])
            engine = line[0]
            taken = self.take(engine.wanted_of, engine.queued, engine.bound)
            if taken is None or taken:
                line.popleft()
                del self.queue[engine]
                served.append((engine, taken))
                open_lines = [line for line in lines.values() if line]
            else:
                open_lines.remove(line)
        return served

    def _go_on(self, served: Sequence[tuple[_Engine, range | None]]) -> None:
        for engine, taken in served:
            if taken:
                engine.submit(taken)
            engine.ask()

    def completed(self, groups: Sequence[int]) -> None:
        """Note that these groups are generated."""
        for group in groups:
            self.took[group] += self.now
        if self.in_order:
            self.generated.add(groups)
            self.rewards.add(groups)
            return
        for _, of_one in groupby(groups, key=self.part_of.__getitem__):
            its = sorted(of_one)
            self.rewards.add(its)
            for stage in self.device_stages:
                stage.arrivals.add(its)

    def came(self, groups: Sequence[int]) -> None:
        """Note that one of the roles that training waits for is done with these, of one partition."""
        if self.in_order:
            self.rewarded.add(groups)
            return
        for group in groups:
            self._lacking[group] = self._lacking.get(group, 1 + len(self.device_stages)) - 1
        self._tick_of += 1
        ready = [group for group in groups if not self._lacking[group] and group not in self.stale]
        self.arrivals.add(ready, self._tick_of)

    def drop(self, below: int) -> int:
        """Take out of training what was begun under this bound or a lower one."""
        dropped = self.arrivals.drop(below)
        self.stale |= dropped
        self.groups += len(dropped)
        return len(dropped)

    # -- work

    def micro_batch(self, role: str) -> int:
        """Groups that a role takes at once."""
        return min(self.batch, self.config.algorithm.micro_batch_groups * self.ranks[role])

    def micro_batches(self, role: str, iteration: int) -> list[range]:
        """The groups of each micro-batch of a role, in order."""
        size, end = self.micro_batch(role), (iteration + 1) * self.batch
        return [range(begin, min(begin + size, end)) for begin in range(iteration * self.batch, end, size)]

    def score_s(self, role: str, groups: Sequence[int]) -> float:
        """Seconds of scoring a micro-batch."""
        key = (groups if self.in_order else tuple(groups), self.ranks[role])
        if key not in self._scored:
            tokens = self.tokens[groups].ravel()
            self._scored[key] = scoring_s(self.cost, tokens, key[1], self.group_size, self.config.training)
        return self._scored[key]

    def train_s(self, groups: Sequence[int]) -> float:
        """Seconds of training on a micro-batch."""
        baselines = int(self.config.algorithm.has_greedy_baseline)
        tokens = self.tokens[groups, baselines:].ravel()
        return training_s(self.cost, tokens, self.ranks["actor"], self.group_size - baselines, self.config.training)


class _Prompts:
    """`schedules.protocol.Prompts`."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    async def admit(self, below: int) -> None:
        job = self._job
        below = min(below, job.groups)
        while job.admitted < below:
            await asyncio.sleep(0)
            if job.admitted == job.ends_of[-1]:
                job.make_parts(below - job.admitted, below - job.admitted)
            job.admitted = min(below, job.ends_of[job.part_of[job.admitted]])
            job.serve()

    async def drop(self, started_below: int) -> int:
        return self._job.drop(started_below)

    async def close(self) -> None:
        job = self._job
        job.closed = True
        for arrivals in (job.arrivals, job.rewards.arrivals, *(stage.arrivals for stage in job.device_stages)):
            arrivals.close()
        job.serve()


class _Rollout:
    """`schedules.protocol.Rollout`."""

    def __init__(self, job: _Job, engines: Sequence[_Engine]) -> None:
        self._job, self.engines = job, engines

    def split(self, cohorts: int | None = None) -> list[_Rollout]:
        count = len(self.engines) if cohorts is None else cohorts
        if not 1 <= count <= len(self.engines):
            raise ValueError(f"{len(self.engines)} rollout engines cannot be split into {count} cohorts")
        return [_Rollout(self._job, self.engines[k::count]) for k in range(count)]

    async def generate(self, iteration: int, batches: int = 1) -> None:
        job = self._job
        parts, algorithm = range(iteration, iteration + batches), job.config.algorithm
        if job.cost.generate_s:
            await asyncio.sleep(job.cost.generate_s)
        share = fair_share(algorithm, len(job.engines))
        if job.schedule.colocated:
            await gather(*(self._in_turn(engine, parts, share) for engine in self.engines))
        else:
            await self._feed(self.engines, parts, share, share * batches)

    async def _in_turn(self, engine: _Engine, parts: Sequence[int | None], share: int) -> None:
        """A batch as one, from waking to sleeping."""
        job = self._job
        async with job.turns_of("rollout", engine.number).turn(f"rollout[{engine.number}].generate"):
            if engine.asleep:
                await asyncio.sleep(reload_s(job.cost))
            await self._feed([engine], parts, share, share * len(parts))
            await asyncio.sleep(offload_s(job.cost))
            engine.asleep = True

    async def stream(self) -> None:
        job = self._job
        algorithm, engines = job.config.algorithm, len(job.engines)
        most = fair_share(algorithm, engines, batches=1 + job.schedule.eta)
        await self._feed(self.engines, [None], fair_share(algorithm, engines), most)

    async def _feed(self, engines: Sequence[_Engine], parts: Sequence[int | None], share: int, most: int) -> None:
        await _all_called(engines, lambda engine, ended: engine.begin(parts, share, most, ended))

    async def set_dispatch_limit(self, below: int) -> None:
        self._job.rebind(self.engines, below)

    async def pause(self, mode: PauseMode) -> None:
        await _all_called(self.engines, lambda engine, stopped: engine.stop(stopped, mode))
        if mode == "abort":
            for engine in self.engines:
                engine.give_up()

    async def resume(self, below: int) -> None:
        await self.set_dispatch_limit(below)
        for engine in self.engines:
            engine.resume()


async def _all_called(engines: Sequence[_Engine], begin: Callable[[_Engine, Callable[[], None]], None]) -> None:
    """Begin something on each engine, with a function that it calls when that is done; wait for all."""
    done, left = asyncio.get_running_loop().create_future(), len(engines)

    def one() -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set_result(None)

    for engine in engines:
        begin(engine, one)
    await done


class _Rewards:
    """Rewards, and advantages, which take no time: groups one after the other, the oldest that is there first."""

    name = "reward"

    def __init__(self, job: _Job) -> None:
        self._job, self._sample_s = job, job.cost.reward_s_per_sample
        self._whole = needs_whole_batch(job.config.algorithm)
        self._ready: list[list[int]] = [[] for _ in range(job.iterations)]
        self._news = asyncio.Event()
        self.arrivals = _Arrivals(job.part_of)

    def add(self, groups: Sequence[int]) -> None:
        if not self._sample_s:
            self._job.came(groups)
        elif not self._job.in_order:
            self.arrivals.add(groups)
        else:
            for group in groups:
                heappush(self._ready[group // self._job.batch], group)
            self._news.set()

    def needed(self, end: int) -> int:
        """The first group that training up to `end` does not wait for."""
        batch = self._job.batch
        return -(-end // batch) * batch if self._whole else end

    async def process(self, iteration: int) -> None:
        if self._sample_s:
            await self._work([iteration])
        await self._job.rewarded.reached((iteration + 1) * self._job.batch)

    async def stream(self) -> None:
        if self._sample_s and not self._job.in_order:
            while groups := await self.arrivals.ask(1):
                await self._pass(groups)
        elif self._sample_s:
            await self._work(range(self._job.iterations))

    async def _work(self, batches: Sequence[int]) -> None:
        for _ in range(len(batches) * self._job.batch):
            while not (ready := next((self._ready[batch] for batch in batches if self._ready[batch]), None)):
                self._news.clear()
                await self._news.wait()
            await self._pass([heappop(ready)])

    async def _pass(self, groups: Sequence[int]) -> None:
        await asyncio.sleep(self._sample_s * self._job.group_size * len(groups))
        self._job.came(groups)


class _Scoring:
    """Reference or old log-probs, micro-batch by micro-batch in order."""

    def __init__(self, job: _Job, role: str, place: int) -> None:
        """place: in the order in which the queue hands rows to roles."""
        self.name, self.done, self._job, self._place = role, _Frontier(job.groups), job, place
        self.arrivals = _Arrivals(job.part_of)
        beside = job.placement.share(role, "actor")
        self.turns: Turns = job.turns_of("actor" if beside else role, 0)
        self.loads = role == "actor_fwd" and not beside
        self.engine_is_free = asyncio.Lock()

    async def process(self, iteration: int) -> None:
        for groups in self._job.micro_batches(self.name, iteration):
            await self._job.generated.reached(groups.stop, self._place)
            await self._score(groups)
            self.done.add(groups)
            await asyncio.sleep(0)  # who waits for these asks for the device first

    async def stream(self) -> None:
        if self._job.in_order:
            for iteration in range(self._job.iterations):
                await self.process(iteration)
        else:
            while groups := await self.arrivals.ask(self._job.micro_batch(self.name)):
                await self._score(groups)
                self._job.came(groups)

    async def _score(self, groups: Sequence[int]) -> None:
        async with self.turns.turn(f"{self.name}[0].work"), self._free():
            await self._job.work(self.name, self._job.score_s(self.name, groups))

    async def load(self) -> None:
        """New weights, between two micro-batches."""
        async with self.turns.turn(f"{self.name}[0].load"), self.engine_is_free:
            await asyncio.sleep(self._job.times.load_s)

    def _free(self) -> AbstractAsyncContextManager[None]:
        return self.engine_is_free if self.loads else nullcontext()


class _Trainer:
    """`schedules.protocol.Trainer`; see `harness.workers.training`."""

    def __init__(self, job: _Job) -> None:
        self._job, self.turns = job, job.turns_of("actor", 0)
        self.waited: list[float] = []
        self.trained: list[Sequence[int]] = []  # groups of each iteration
        self._steps = 0

    async def train(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        job, algorithm = self._job, self._job.config.algorithm
        scored_beside = job.placement.share("actor_fwd", "actor")
        steps, freezes = algorithm.steps_per_version, algorithm.freezes_proximal
        self.waited.append(0.0)
        arriving = self._in_order(iteration) if job.in_order else self._as_completed(first)
        if steps > 1 and (freezes or scored_beside):
            parts = list[Sequence[int]]()
            async for groups in arriving:
                parts.append(groups)
                if freezes:
                    async with self._turn():
                        await job.work("actor", job.score_s("actor", groups))
            async with self._turn():
                seconds = sum(map(job.train_s, parts))
                checkpoint_s = job.cost.checkpoint.of(iteration + 1)
                await job.work("actor", algorithm.epochs * seconds + steps * job.cost.train_step_s + checkpoint_s)
            return
        mini, since = algorithm.mini_batch_groups, 0
        kept = list[Sequence[int]]()
        async for groups in arriving:
            if since == mini:
                await self._step()
                since = 0
            await self._compute(groups)
            kept.append(groups)
            since += len(groups)
        await self._step()
        for _ in range(1, algorithm.epochs):
            since = 0
            for groups in kept:
                if since == mini:
                    await self._step()
                    since = 0
                await self._compute(groups)
                since += len(groups)
            await self._step()

    async def _in_order(self, iteration: int) -> AsyncIterator[Sequence[int]]:
        job = self._job
        self.trained.append(range(iteration * job.batch, (iteration + 1) * job.batch))
        inputs = [stage.done for stage in job.device_stages]
        for groups in job.micro_batches("actor", iteration):
            since = job.now
            await job.rewarded.reached(job.rewards.needed(groups.stop))
            for frontier in inputs:
                await frontier.reached(groups.stop)
            self.waited[-1] += job.now - since
            yield groups

    async def _as_completed(self, first: Sequence[tuple[int, int]]) -> AsyncIterator[Sequence[int]]:
        """Take whatever is complete, up to a micro-batch; the next one is asked for while one is computed."""
        job, taken = self._job, list[int]()
        mini, most = job.config.algorithm.mini_batch_groups, job.micro_batch("actor")
        due = [(limit, job.arrivals.taken + groups) for limit, groups in first]

        def ask() -> asyncio.Future[list[int]]:
            return job.arrivals.ask(min(most, job.batch - len(taken), mini - len(taken) % mini), due)

        asked = ask()
        while len(taken) < job.batch:
            since = job.now
            groups = await asked
            self.waited[-1] += job.now - since
            taken += groups
            if len(taken) < job.batch:
                asked = ask()
            await asyncio.sleep(0)
            yield groups
        self.trained.append(taken)

    async def _compute(self, groups: Sequence[int]) -> None:
        async with self._turn():
            await self._job.work("actor", self._job.train_s(groups))

    async def _step(self) -> None:
        self._steps += 1
        version, within = divmod(self._steps, self._job.config.algorithm.steps_per_version)
        checkpoint_s = 0.0 if within else self._job.cost.checkpoint.of(version)
        async with self._turn():
            await self._job.work("actor", self._job.cost.train_step_s + checkpoint_s)

    def _turn(self) -> AbstractAsyncContextManager[None]:
        return self.turns.turn("actor[0].train")


class _Weights:
    """`schedules.protocol.Weights`; see `harness.weight_sync.coordinator`."""

    def __init__(self, job: _Job) -> None:
        self._job, self._scorers = job, [stage for stage in job.device_stages if stage.loads]
        carrier = transport_of(job.schedule.transport)
        self._staged, self._in_turn = carrier.staged, carrier.in_turn and not job.schedule.colocated
        self._left_at, self._arrived = 0.0, 0
        self._progress = asyncio.Event()
        self._transfer: asyncio.Task[None] | None = None

    async def publish(self, version: int) -> None:
        job = self._job
        await asyncio.sleep(0)
        await self.finish()
        engines = self._load(job.engines, version)
        loads = [engines, *(scorer.load() for scorer in self._scorers)]
        if self._staged or self._in_turn:
            await self._send()
            await asyncio.sleep(job.times.stage_s if self._staged else 0.0)
            await gather(*loads)
        else:
            await gather(self._send(), *loads)
        self._arrived = version
        self._end(version)

    async def mark_version(self, version: int) -> None:
        await asyncio.sleep(0)
        self._end(version)

    async def start_transfer(self, version: int) -> None:
        await asyncio.sleep(0)
        await self.finish()
        await self._send()
        self._transfer = asyncio.create_task(self._to_hosts(version))
        self._end(version)

    async def wait_arrived(self, version: int) -> None:
        while self._arrived < version:
            self._progress.clear()
            await self._progress.wait()

    async def swap(self, rollout: _Rollout, version: int) -> None:
        await self.wait_arrived(version)
        await self._load([engine for engine in rollout.engines if engine.version < version], version)

    async def finish(self) -> None:
        """Wait for the transfer under way."""
        if self._transfer is not None:
            await self._transfer

    async def _to_hosts(self, version: int) -> None:
        async def scorers() -> None:
            await asyncio.sleep(self._job.times.stage_s)
            await gather(*(scorer.load() for scorer in self._scorers))

        loading = asyncio.create_task(scorers())
        await asyncio.sleep(self._job.times.stage_s)
        self._arrived = version
        self._progress.set()
        await loading

    async def _send(self) -> None:
        job = self._job
        await self._ready()
        async with job.trainer.turns.turn("actor[0].send"):
            await job.work("send", job.times.send_s)
        self._left_at = job.now + job.times.stage_s

    async def _ready(self) -> None:
        if (left := self._left_at - self._job.now) > 0:
            await asyncio.sleep(left)

    async def _load(self, engines: Sequence[_Engine], version: int) -> None:
        job = self._job
        if job.schedule.colocated:
            return await gather(*(self._load_in_turn(engine, version) for engine in engines))
        if engines:
            share = len(engines) / len(job.engines)
            job.worked["load"] = job.worked.get("load", 0.0) + share * job.times.load_s
            await asyncio.sleep(job.times.load_s + job.cost.evaluation.of(version))
        for engine in engines:
            engine.load(version, keep_cache=job.config.engine.keep_cache)

    async def _load_in_turn(self, engine: _Engine, version: int) -> None:
        job = self._job
        async with job.turns_of("rollout", engine.number).turn(f"rollout[{engine.number}].load"):
            job.worked["load"] = job.worked.get("load", 0.0) + job.times.load_s / len(job.engines)
            await asyncio.sleep(job.times.load_s + job.cost.evaluation.of(version))
            engine.load(version, keep_cache=True)

    def _end(self, version: int) -> None:
        """An iteration has ended."""
        job, now = self._job, self._job.now
        under_way = sum(now - since for engine in job.engines if (since := engine.busy_since) is not None)
        job.ends.append(now)
        job.worked_s.append(dict(job.worked))
        job.generated_s.append(job.generating_s + under_way)
