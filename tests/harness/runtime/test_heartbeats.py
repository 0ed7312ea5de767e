"""Workers that stop without dying: they are noticed, named and ended."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.runtime.heartbeats import Heartbeats, QueueBeat
from harness.runtime.local_runtime import LocalRuntime
from harness.runtime.runtime import WorkerDied
from harness.runtime.worker_client import RemoteRole
from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.remote.client import RemoteQueue
from tests.support.worker_roles import EchoRole, build_echoes

LIMIT_S = 3.0


@pytest.fixture
def runtime() -> Iterator[LocalRuntime]:
    preload = ["tests.support.worker_roles"]
    with LocalRuntime(gpu=False, start_timeout_s=120, call_timeout_s=60, logs=None, preload=preload) as running:
        yield running


def started(runtime: LocalRuntime, name: str, *numbers: int) -> list[RemoteRole[EchoRole]]:
    return runtime.start_worker(name, (), {("echo", number): EchoRole for number in numbers}, build_echoes)


async def test_a_process_that_is_stopped_counts_as_dead_and_its_calls_end(runtime: LocalRuntime) -> None:
    stopped, other = started(runtime, "one", 0, 1), started(runtime, "other", 2)
    told: list[str] = []
    beats = Heartbeats([*stopped, *other], LIMIT_S, told.append)
    pid = await stopped[0].role.pid()
    await other[0].role.pid()
    async with asyncio.timeout(60):
        watching = asyncio.create_task(beats.watch())
        while any(state["heard_s_ago"] is None for state in beats.states()):
            await asyncio.wait([watching], timeout=LIMIT_S / 10)
        assert {state["state"] for state in beats.states()} <= {"answers", "computes"}
        os.kill(pid, signal.SIGSTOP)
        calls = [asyncio.ensure_future(role.role.echo(1)) for role in stopped]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        watching.cancel()
    for number, answer in enumerate(answers):
        assert isinstance(answer, WorkerDied)
        assert str(answer).startswith(f"echo[{number}] died during echo: one did not answer for 3 s (cluster.heartbeat")
        assert "waits for calls" in str(answer)
    assert len(told) == 1
    assert [state["state"].partition(":")[0] for state in beats.states()][:2] == ["ended", "ended"]
    assert await other[0].role.echo(2) == [2], "it answers, and nothing happened to it"
    assert await stopped[0].death() == told[0]


async def test_who_only_waited_for_the_one_stopped_is_freed(runtime: LocalRuntime, tmp_path: Path) -> None:
    (waiting,), (stopped,) = started(runtime, "one", 0), started(runtime, "other", 1)
    freed, told = tmp_path / "freed", list[str]()

    async def free() -> None:
        freed.touch()

    await waiting.role.pid()
    os.kill(await stopped.role.pid(), signal.SIGSTOP)
    async with asyncio.timeout(60):
        transfer = asyncio.ensure_future(waiting.role.block(str(freed)))
        other_end = asyncio.ensure_future(stopped.role.echo(1))
        watching = asyncio.create_task(Heartbeats([waiting, stopped], LIMIT_S, told.append, free=free).watch())
        assert await transfer == str(freed)
        with pytest.raises(WorkerDied, match="other did not answer for 3 s"):
            await other_end
        watching.cancel()
    assert len(told) == 1 and await waiting.role.echo(2) == [2]


async def test_a_queue_that_is_stopped_is_ended_and_every_call_of_it_says_why(runtime: LocalRuntime) -> None:
    queue = runtime.start_queue(QueueSpec({"x": ColumnSpec("int64")}, {"read": TaskSpec(("x",))}))
    assert isinstance(queue, RemoteQueue)
    told: list[str] = []
    beats = Heartbeats([QueueBeat(queue, runtime.kill_queue)], LIMIT_S, told.append)
    reading = asyncio.create_task(queue.get("read", 1))
    async with asyncio.timeout(60):
        watching = asyncio.create_task(beats.watch())
        while beats.states()[0]["heard_s_ago"] is None:
            await asyncio.wait([watching], timeout=LIMIT_S / 10)
        os.kill(runtime._queue.process.pid, signal.SIGSTOP)
        with pytest.raises(ConnectionError, match="^queue did not answer for 3 s .cluster.heartbeat_timeout_s., and"):
            await reading
        watching.cancel()
    assert len(told) == 1 and beats.states()[0]["state"] == f"ended: {told[0]}"
    with pytest.raises(ConnectionError, match="queue did not answer"):
        await queue.describe()
    assert runtime._queue.process.wait(60) == -signal.SIGKILL


async def test_a_pause_of_this_process_ends_nobody(runtime: LocalRuntime) -> None:
    (role,) = started(runtime, "one", 0)
    await role.role.pid()
    asked = 0

    def hours_later() -> float:
        nonlocal asked
        asked += 1
        return 3600.0 * asked

    beats = Heartbeats([role], LIMIT_S, now=hours_later)
    watching = asyncio.create_task(beats.watch())
    while beats.states()[0]["heard_s_ago"] is None:
        await asyncio.wait([watching], timeout=LIMIT_S / 10)
    watching.cancel()
    assert await role.role.echo(3) == [3]
