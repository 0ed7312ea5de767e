"""Completion order played through over many cases: no lag beyond the bound, by waiting in time or by dropping."""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import get_args

import pytest

from schedules import Schedule
from schedules.capacity import Capacity, CompletionOrder
from schedules.fully_async import FullyAsync
from schedules.partial_rollout_sync import PartialRolloutSync
from schedules.protocol import PauseMode
from schedules.windowed import Windowed

PATIENCE = 100_000  # turns


class CompletionJob:
    """Groups are numbers; engines and trainer take turns of the event loop. What cannot go on is an error.

    The trainer keeps what the protocol says of `first`: a group may go before those of a pair only while these would
    still be among the next `groups` trained; and takes none beyond the schedule's window.
    """

    host_stages: Sequence[None] = ()
    stages: Sequence[None] = ()
    device_stages: Sequence[None] = ()

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random.choice
        self.iterations, self.batch = draw([4, 8]), draw([1, 2, 5])
        self.engines, self.train_turns, self.transfer_turns = draw([1, 3, 12, 40]), draw([0, 1, 30]), draw([0, 5, 200])
        self.tail = draw([1.0, 3.0])
        self.prompts = self.rollout = self.trainer = self.weights = self
        self.admitted, self.total, self.next, self.bound, self.version = 0, self.iterations * self.batch, 0, 0, 0
        self.paused, self.closed, self.mode, self.stands = False, False, "keep", False
        self.running = 0
        self.started: dict[int, tuple[int, int]] = {}  # group -> bound that it was taken under, version that began it
        self.ready: list[int] = []
        self.taken: dict[int, int] = {}  # group -> iteration
        self.complete: list[int] = []
        self.counted: dict[int, int] = {}  # the same of those that `completed` waited for
        self.dropped: set[int] = set()
        self.window: int | None = None
        self.widest = 0
        """The most groups from the oldest that is neither trained nor dropped to the last one admitted."""

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(PATIENCE):
            if condition():
                return
            await asyncio.sleep(0)
        raise TimeoutError("deadlock")

    async def admit(self, below: int) -> None:
        self.admitted = max(self.admitted, min(below, self.total))
        done = self.taken.keys() | self.dropped
        oldest = next(group for group in range(self.admitted + 1) if group not in done)
        self.widest = max(self.widest, self.admitted - oldest)

    async def drop(self, started_below: int) -> int:
        stale = {group for group in self.open() if self.started[group][0] <= started_below}
        self.dropped |= stale
        self.ready = [group for group in self.ready if group not in stale]
        self.total += len(stale)
        return len(stale)

    def open(self) -> set[int]:
        return self.started.keys() - self.taken.keys() - self.dropped

    async def completed(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        await self._take(iteration, first, self.complete, self.counted)

    async def close(self) -> None:
        self.closed = True

    async def stream(self) -> None:
        async with asyncio.TaskGroup() as engines:
            for _ in range(self.engines):
                engines.create_task(self._engine())

    async def _engine(self) -> None:
        while True:
            await self.until(lambda: self.closed or self.next < min(self.bound, self.admitted))
            if self.next >= min(self.bound, self.admitted):
                return
            group, bound, self.next = self.next, self.bound, self.next + 1
            self.started[group] = bound, self.version
            await self.until(lambda: not self.paused)  # it may be taken from the queue while the engine is paused
            self.started[group] = bound, self.version
            self.running += 1
            left = length = min(2000, int(self.random.lognormvariate(2, self.tail)))
            while left:
                if self.paused and self.mode != "wait":
                    await self.until(lambda: not self.paused)
                    left = length if self.mode == "abort" else left
                left -= 1
                await asyncio.sleep(0)
            self.running -= 1
            if group not in self.dropped:
                self.ready.append(group)
                self.complete.append(group)

    async def set_dispatch_limit(self, below: int) -> None:
        assert below >= self.bound
        self.bound = below

    async def pause(self, mode: PauseMode) -> None:
        self.paused, self.mode = True, mode
        await self.until(lambda: mode != "wait" or self.running == 0)

    async def resume(self, below: int) -> None:
        assert below > self.bound, "bounds tell versions apart"
        self.bound, self.paused = below, False

    async def train(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        await self._take(iteration, first, self.ready, self.taken, self.train_turns)

    async def _take(
        self, iteration: int, first: Sequence[tuple[int, int]], ready: list[int], taken: dict[int, int], turns: int = 0
    ) -> None:
        """A batch of what is ready, as far as `first` leaves room."""
        assert ready is not self.ready or not self.stands or self.paused, "engines have the devices"
        for k in range(self.batch):
            await self.until(lambda k=k: self._next(first, k, ready, taken) is not None)  # type: ignore[misc]
            group = self._next(first, k, ready, taken)
            assert group is not None
            ready.remove(group)
            taken[group] = iteration
            for _ in range(turns):
                await asyncio.sleep(0)

    def _next(self, first: Sequence[tuple[int, int]], taken: int, ready: list[int], gone: dict[int, int]) -> int | None:
        """The group that has been ready for longest of those that may go now."""
        for limit, groups in first:
            pressing = self.started.keys() - gone.keys() - self.dropped
            pressing = {group for group in pressing if self.started[group][0] <= limit}
            assert len(pressing) <= groups - taken, "it is never too late already"
            if len(pressing) == groups - taken:
                return next((group for group in ready if group in pressing), None)
        oldest = next(group for group in range(self.total + 1) if group not in gone)
        return next((group for group in ready if self.window is None or group < oldest + self.window), None)

    async def publish(self, version: int) -> None:
        assert self.paused
        for _ in range(self.transfer_turns):
            await asyncio.sleep(0)
        self.version = version

    async def mark_version(self, version: int) -> None:
        """Engines do not get it."""

    async def play(self, schedule: Schedule) -> list[int]:
        """Runs it, and gives the lag of every trained group at its first token."""
        self.stands = schedule.colocated
        self.window = 1 if schedule.order == "fifo" else schedule.window_groups(self.batch)
        await schedule.run(self)  # type: ignore[arg-type]
        assert sorted(self.taken.values()) == [i for i in range(self.iterations) for _ in range(self.batch)]
        assert self.taken.keys() | self.dropped == set(range(self.admitted)) and not self.taken.keys() & self.dropped
        return [iteration - self.started[group][1] for group, iteration in self.taken.items()]


ETAS = pytest.mark.parametrize("eta", [0, 0.5, 1, 1.5, 2, 3])
SEEDS = range(10)


@ETAS
@pytest.mark.parametrize("mode", get_args(PauseMode))
async def test_what_would_lag_too_much_is_waited_for_in_time(eta: float, mode: PauseMode) -> None:
    worst = Capacity(1, eta).worst_lag
    for seed in SEEDS:
        job = CompletionJob(seed)
        lags = await job.play(FullyAsync(max_staleness=eta, pause=mode, order="completion"))
        assert 0 <= min(lags) and max(lags) <= worst, seed
        assert not job.dropped
        assert job.widest <= (2 * worst + 1) * job.batch, "what the queue has to hold"


@ETAS
@pytest.mark.parametrize("mode", get_args(PauseMode))
async def test_what_would_lag_too_much_is_dropped_and_made_up_for(eta: float, mode: PauseMode) -> None:
    worst, dropped = Capacity(1, eta).worst_lag, 0
    for seed in SEEDS:
        job = CompletionJob(seed)
        lags = await job.play(FullyAsync(max_staleness=eta, pause=mode, order="completion", on_stale="drop"))
        assert 0 <= min(lags) and max(lags) <= worst, seed
        assert job.widest <= (3 * worst + 1) * job.batch, "what the queue has to hold, but for dropped ones that run"
        dropped += len(job.dropped)
    assert (dropped > 0) == (eta > 0) or mode == "wait", "there was something to drop"


@pytest.mark.parametrize(("eta", "every"), [(1, 2), (1.5, 2), (2, 2), (2, 3), (3, 3), (4, 3)])
async def test_bounds_hold_where_engines_get_every_second_or_third_version(eta: float, every: int) -> None:
    worst, dropped = Capacity(1, eta).worst_lag, 0
    for seed in SEEDS:
        for on_stale in ("wait", "drop"):
            job = CompletionJob(seed)
            options = {"max_staleness": eta, "order": "completion", "publish_every": every}
            lags = await job.play(FullyAsync(**options, on_stale=on_stale))  # type: ignore[arg-type]
            assert 0 <= min(lags) and max(lags) <= worst, seed
            begun = {version for _, version in job.started.values()}
            assert all(version % every == 0 for version in begun - {job.iterations})
            dropped += len(job.dropped)
            assert on_stale == "drop" or not job.dropped
    assert (dropped > 0) == (eta > every - 1), "else all that a version may start is trained before the next"


@pytest.mark.parametrize(("over", "worst"), [(0, 0), (0.3, 1), (1, 1), (1, 2), (0.5, 4), (2.5, 3)])
async def test_what_is_carried_on_is_waited_for_while_engines_stand_still(over: float, worst: int) -> None:
    overtaken = False
    for seed in SEEDS:
        job = CompletionJob(seed)
        lags = await job.play(PartialRolloutSync(over=over, max_staleness=worst))
        assert 0 <= min(lags) and max(lags) <= worst, seed
        assert job.widest <= (worst + math.ceil(over) + 1) * job.batch, "what the queue has to hold"
        assert sorted(job.counted) == sorted(job.taken)
        overtaken |= any(group // job.batch != iteration for group, iteration in job.taken.items())
    assert overtaken == (over > 0)


@ETAS
@pytest.mark.parametrize("window", [0, 0.2, 1, 2.5])
@pytest.mark.parametrize("mode", get_args(PauseMode))
async def test_nothing_is_overtaken_from_beyond_a_window(eta: float, window: float, mode: PauseMode) -> None:
    ahead = 0.0
    for seed in SEEDS[:4]:
        job, schedule = CompletionJob(seed), Windowed(max_staleness=eta, window=window, pause=mode)
        lags = await job.play(schedule)
        assert 0 <= min(lags), seed
        most = math.floor(window * job.batch) if eta else 0
        assert max(lags) <= (math.ceil(eta + most / job.batch) if eta else 0) <= math.ceil(schedule.eta), seed
        assert job.widest <= math.ceil((1 + eta) * job.batch) + most, "what the queue has to hold"
        positions = {group: position for position, group in enumerate(job.taken)}
        overtaken = max(position - group for group, position in positions.items())
        assert overtaken <= most, seed
        ahead = max(ahead, overtaken / job.batch)
    assert (ahead > 0) == (eta > 0 and window > 0)


async def test_long_groups_are_overtaken() -> None:
    for seed in SEEDS:
        job = CompletionJob(seed)
        await job.play(FullyAsync(order="completion"))
        if list(job.taken) != sorted(job.taken):
            return
    raise AssertionError("always in the order of admission")


async def test_to_wait_only_when_a_group_is_due_would_be_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a staleness of 2, iteration 1 may train what version 1 started, and leave 2 batches due in iteration 2."""
    due = CompletionOrder.due

    def due_in_this_iteration(order: CompletionOrder) -> list[tuple[int, int]]:
        return [pair for pair in due(order) if pair[1] == order._capacity.batch]

    monkeypatch.setattr(CompletionOrder, "due", due_in_this_iteration)
    with pytest.raises(ExceptionGroup, match="unhandled errors") as caught:
        for seed in range(400):
            await CompletionJob(seed).play(FullyAsync(max_staleness=2, order="completion"))
    assert caught.group_contains(AssertionError, match="never too late")
