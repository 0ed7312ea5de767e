"""A run in which nothing happens ends, and says who waits for what; and time that jumps: as asyncio has it, without
waiting, and with an error where nothing can ever happen."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest

from harness.protocols import Clock
from harness.runtime import runtime
from harness.runtime.runtime import Progress, Stalled, Waits, collect_waits, watch_progress
from harness.runtime.virtual_runtime import Deadlock, LocalRole, VirtualClock, VirtualLoop, VirtualRuntime, run_virtual
from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from tests.support.local_queue import virtual


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


async def test_an_engine_that_samples_puts_the_stall_off_and_a_stuck_one_not(monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- time that jumps


def test_time_is_that_of_the_timers_and_passes_at_once() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(seconds)
            seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper("a", 3600.0, 3))
            tasks.create_task(sleeper("b", 5000.0, 2))

    run_virtual(main())
    assert seen == [("a", 3600.0), ("b", 5000.0), ("a", 7200.0), ("b", 10000.0), ("a", 10800.0)]


@virtual
async def test_no_time_passes_while_something_is_ready() -> None:
    asyncio.get_running_loop().call_later(1e-9, lambda: None)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert asyncio.get_running_loop().time() == 0.0


@pytest.mark.parametrize("start", [0.0, 1.0, 1e6, 1e12])
@virtual
async def test_timers_fire_at_exactly_their_time_however_late_it_is(start: float) -> None:
    loop, seen = asyncio.get_running_loop(), list[float]()
    await asyncio.sleep(start)
    done = loop.create_future()
    for when in (start + 3.0, start + 1.0, start + 1.0, start + 2.0):
        loop.call_at(when, lambda: seen.append(loop.time()))
    loop.call_at(start + 4.0, done.set_result, None)
    await done
    assert seen == [start + 1.0, start + 1.0, start + 2.0, start + 3.0]


@virtual
async def test_a_timer_a_moment_later_is_not_early_and_timeouts_are_of_virtual_time() -> None:
    loop, seen = asyncio.get_running_loop(), list[float]()
    for when in (1.0, 1.0 + 1e-12):
        loop.call_at(when, lambda: seen.append(loop.time()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(86_400.0):
            await asyncio.Event().wait()
    assert [*seen, loop.time()] == [1.0, 1.0 + 1e-12, 86_400.0]


def test_a_deadlock_says_what_waits_and_lets_everyone_clean_up() -> None:
    cleaned: list[int] = []

    async def waits_for_news(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            cleaned.append(number)

    async def job() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(waits_for_news(number), name=f"worker-{number}")
            await asyncio.sleep(2.5)
            await asyncio.Queue[int]().get()

    with pytest.raises(Deadlock) as caught:
        run_virtual(job(), lambda: ["rollout[0].feed waits for room"])
    first, wait, *tasks = str(caught.value).splitlines()
    assert first == "nothing can run and nothing is due at 2.5 s of simulated time:"
    assert wait == "  rollout[0].feed waits for room"
    assert len(tasks) == 2
    main, workers = sorted(tasks, key=lambda line: "worker" in line)
    assert main.endswith(".job > Queue.get")
    assert workers.startswith("  worker-0, worker-1, worker-2 and 2 more: ")
    assert workers.endswith(".waits_for_news > Event.wait")
    assert sorted(cleaned) == [0, 1, 2, 3, 4]


def test_an_error_of_the_clean_up_is_noted_beside_the_deadlock() -> None:
    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("while cleaning up")

    with pytest.raises(Deadlock) as caught:
        run_virtual(main())
    assert caught.value.__notes__ == ["and then, while the run was taken down: KeyError('while cleaning up')"]


async def in_a_thread() -> None:
    await asyncio.to_thread(print)


async def in_an_executor() -> None:
    await asyncio.get_running_loop().run_in_executor(None, print)


async def over_the_network() -> None:
    await asyncio.open_connection("127.0.0.1", 9)


async def from_a_socket() -> None:
    with socket.socket() as unbound:
        await asyncio.get_running_loop().sock_recv(unbound, 1)


async def by_a_process() -> None:
    await asyncio.create_subprocess_exec("true")


@pytest.mark.parametrize("wait", [in_a_thread, in_an_executor, over_the_network, from_a_socket, by_a_process])
def test_what_takes_real_time_is_refused(wait: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await wait()

    with pytest.raises(RuntimeError, match="a virtual clock cannot wait for threads, sockets or processes"):
        run_virtual(main())


def test_ctrl_c_cancels_and_then_ends_the_run() -> None:
    cleaned = []

    async def interrupted() -> None:
        asyncio.get_running_loop().call_later(5.0, signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.sleep(100.0)
        finally:
            cleaned.append(asyncio.get_running_loop().time())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_virtual(interrupted())
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleaned == [5.0]


@virtual
async def test_a_clock_counts_from_when_it_was_made_or_restarted() -> None:
    await asyncio.sleep(10.0)
    clock = VirtualClock(asyncio.get_running_loop())
    _: Clock = clock
    await clock.sleep(2.0)
    seen = [clock.now()]
    clock.restart()
    await clock.sleep(0.5)
    assert [*seen, clock.now()] == [2.0, 0.5]


def test_one_loop_runs_several_coroutines_one_after_the_other() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(asyncio.sleep(3.0))
        runner.run(asyncio.sleep(4.0))
        assert runner.get_loop().time() == 7.0


class Host:
    def __init__(self, number: int, greeting: str) -> None:
        self.number, self.greeting = number, greeting

    async def greet(self, whom: str) -> str:
        await asyncio.sleep(1.0)
        return f"{self.greeting}, {whom}, from {self.number}"

    async def fail(self) -> None:
        raise KeyError("itself")


def test_roles_and_queues_of_this_process_are_called_as_far_ones() -> None:
    async def main() -> None:
        host = ("host", 3)
        (handle,) = VirtualRuntime().start_worker("here", (), {host: Host}, lambda roles: {host: Host(3, "hello")})
        assert (handle.name, await handle.death()) == ("host[3]", None)
        assert await handle.role.greet("you") == "hello, you, from 3"
        with pytest.raises(KeyError, match="itself"):
            await handle.role.fail()

    run_virtual(main())
    assert LocalRole("a", None).name == "a"

    async def main() -> None:
        spec = QueueSpec({"prompt": ColumnSpec("int64", ragged=True)}, {"rollout": TaskSpec(("prompt",))}, 8)
        assert await VirtualRuntime().start_queue(spec).get("rollout", 1, timeout_s=None) is None

    with pytest.raises(Deadlock, match="main > TransferQueue.get > LocalQueue.get_batch"):
        run_virtual(main())
