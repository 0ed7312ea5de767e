"""A run in which nothing happens ends, and says who waits for what; on a clock that the test moves."""

import asyncio
from contextlib import closing

import pytest

from harness.runtime import runtime
from harness.runtime.runtime import Progress, Stalled, Waits, collect_waits, watch_progress


class HandClock:
    """Sleeping takes it on; `at_each` says what else happens then."""

    def __init__(self) -> None:
        self.time = 0.0
        self.events = 0
        self.last_event = 0.0

    def now(self) -> float:
        return self.time

    async def progress(self) -> int:
        return self.events

    async def sleep(self, seconds: float) -> None:
        before, self.time = self.time, self.time + seconds
        if before < self.last_event:
            self.events += 1
        await asyncio.sleep(0)


async def two_loops() -> list[str]:
    return ["rollout[0].feed waits for a free slot", "actor[0].train waits for rows of batch 3"]


async def test_a_stall_names_the_waiting_loops_or_says_that_there_is_none() -> None:
    clock = HandClock()
    with pytest.raises(Stalled) as caught:
        await watch_progress(clock.progress, two_loops, 600.0, clock)
    assert str(caught.value) == (
        "nothing happened for 600 s; waiting: rollout[0].feed waits for a free slot; "
        "actor[0].train waits for rows of batch 3"
    )
    assert 600 <= clock.time <= 630

    async def no_loop() -> list[str]:
        return []

    with pytest.raises(Stalled, match="waiting: no loop"):
        await watch_progress(HandClock().progress, no_loop, 5.0, HandClock())


@pytest.mark.parametrize("last_event", [10.0, 1000.0])
async def test_progress_puts_the_stall_off(last_event: float) -> None:
    clock = HandClock()
    clock.last_event = last_event
    with pytest.raises(Stalled):
        await watch_progress(clock.progress, two_loops, 100.0, clock)
    assert last_event + 95 <= clock.time <= last_event + 115


@pytest.mark.parametrize(("leaves_at", "ends"), [(None, 1800.0), (0.0, 1060.0), (1300.0, 1300.0)])
async def test_what_is_slower_than_ever_is_told_once_or_ends_a_run(leaves_at: float | None, ends: float) -> None:
    clock, told = HandClock(), list[tuple[float, str]]()
    clock.last_event = 1000.0

    with pytest.raises(Stalled, match="nothing happened for 1800 s" if leaves_at is None else "SIGTERM asked to leave"):
        await watch_progress(
            clock.progress,
            two_loops,
            1800.0,
            clock,
            tell=lambda line: told.append((clock.time, line)),
            leave=lambda: leaves_at is not None and clock.time >= leaves_at,
        )
    assert clock.time == pytest.approx(ends + 1000.0 * (leaves_at is None), abs=20)
    if leaves_at != 0:
        ((at, line),) = told
        assert at == pytest.approx(1060.0, abs=20)
        assert line.startswith("nothing happened for 60 s; waiting: rollout[0].feed waits for a free slot; actor[0]")


async def test_a_pause_is_unusual_only_where_it_is_longer_than_those_before() -> None:
    """Of 100 s each, as of a large model's step: after the first, 500 s are told of, not 60."""
    clock, told = HandClock(), list[float]()

    async def progress() -> int:
        return int(min(clock.time, 1000.0) // 100)

    with pytest.raises(Stalled):
        await watch_progress(progress, two_loops, 1800.0, clock, tell=lambda line: told.append(clock.time))
    assert told == [pytest.approx(60.0, abs=20), pytest.approx(1500.0, abs=30)]


async def test_a_watch_is_a_timeout_and_can_be_cancelled() -> None:
    clock = HandClock()
    clock.last_event = float("inf")
    watching = asyncio.create_task(watch_progress(clock.progress, two_loops, 1.0, clock))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert issubclass(Stalled, TimeoutError)


class Worker:
    """Answers, unless it computes."""

    def __init__(self, name: str, computes: bool) -> None:
        self.name, self.computes = name, computes
        self.tokens = self.speed = 0
        self.free = asyncio.Event()
        self.waits = Waits(name)

    @property
    def role(self) -> "Worker":
        return self

    async def waiting(self) -> list[str]:
        if self.computes:
            await self.free.wait()
        return self.waits.lines()

    async def progress(self) -> int:
        await self.waiting()
        self.tokens += self.speed
        return self.tokens


async def test_who_computes_is_told_apart_and_counts_once_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_ANSWER_S", 0.01)
    workers = [Worker("reward[0]", False), Worker("actor[0]", True), Worker("reward[1]", False)]
    with workers[0].waits("work", "rows of train_3"), workers[0].waits("load", "version 3"):
        assert await collect_waits(workers) == [
            "reward[0].work waits for rows of train_3",
            "reward[0].load waits for version 3",
            "actor[0] does not answer (computing, or dead)",
        ]
    trainer = Worker("actor[0]", True)
    with closing(Progress([trainer])) as roles:
        assert await roles.now() == await roles.now() == ()
        trainer.free.set()
        assert await roles.now() == (("actor[0]", 0),)
        trainer.free.clear()
        trainer.speed = 1
        assert await roles.now() == (("actor[0]", 0),)
        trainer.free.set()
        assert await roles.now() == (("actor[0]", 1),), "asked while it computed, answered after that"


async def test_an_engine_that_samples_puts_the_stall_off_and_a_stuck_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "_ANSWER_S", 0.01)
    engine, stuck, clock = Worker("rollout[0]", False), Worker("actor[0]", True), HandClock()

    async def progress() -> object:
        engine.speed = 30 if clock.time < 500 else 0  # one response, longer than any limit
        return await roles.now()

    with closing(Progress([engine, stuck])) as roles:
        with pytest.raises(Stalled, match="nothing happened for 100 s"):
            await watch_progress(progress, two_loops, 100.0, clock)
    assert 595 <= clock.time <= 615


def test_a_wait_is_taken_down_when_it_ends_also_by_an_error() -> None:
    waits = Waits("actor[1]")
    with pytest.raises(TimeoutError), waits("train", "rows of batch 0"):
        assert waits.lines() == ["actor[1].train waits for rows of batch 0"]
        raise TimeoutError
    assert waits.lines() == []
