"""Time that jumps: as asyncio has it, without waiting, and with an error where nothing can ever happen."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable

import pytest

from harness.protocols import Clock
from harness.runtime.virtual_runtime import Deadlock, LocalRole, VirtualClock, VirtualLoop, VirtualRuntime, run_virtual
from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec


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


def test_no_time_passes_while_something_is_ready() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(1e-9, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.0


@pytest.mark.parametrize("start", [0.0, 1.0, 1e6, 1e12])
def test_timers_fire_at_exactly_their_time_however_late_it_is(start: float) -> None:
    async def main() -> list[float]:
        loop, seen = asyncio.get_running_loop(), list[float]()
        await asyncio.sleep(start)
        done = loop.create_future()
        for when in (start + 3.0, start + 1.0, start + 1.0, start + 2.0):
            loop.call_at(when, lambda: seen.append(loop.time()))
        loop.call_at(start + 4.0, done.set_result, None)
        await done
        return seen

    assert run_virtual(main()) == [start + 1.0, start + 1.0, start + 2.0, start + 3.0]


def test_a_timer_a_moment_later_is_not_early_and_timeouts_are_of_virtual_time() -> None:
    async def main() -> list[float]:
        loop, seen = asyncio.get_running_loop(), list[float]()
        for when in (1.0, 1.0 + 1e-12):
            loop.call_at(when, lambda: seen.append(loop.time()))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(86_400.0):
                await asyncio.Event().wait()
        return [*seen, loop.time()]

    assert run_virtual(main()) == [1.0, 1.0 + 1e-12, 86_400.0]


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


def test_a_clock_counts_from_when_it_was_made_or_restarted() -> None:
    async def main() -> list[float]:
        await asyncio.sleep(10.0)
        clock = VirtualClock(asyncio.get_running_loop())
        _: Clock = clock
        await clock.sleep(2.0)
        seen = [clock.now()]
        clock.restart()
        await clock.sleep(0.5)
        return [*seen, clock.now()]

    assert run_virtual(main()) == [2.0, 0.5]


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
