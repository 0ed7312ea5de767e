"""Workers as processes: calls, refusals, deaths, ends; those that stop without dying are noticed, named and ended."""

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.config.placement import Placement
from harness.metrics.system import own_seconds
from harness.protocols import Span
from harness.rpc.handshake import ANSWER, REFUSED, STEP
from harness.rpc.sockets import Framer, listen
from harness.runtime import messages as m
from harness.runtime.fork_server import ForkServer
from harness.runtime.heartbeats import Heartbeats, QueueBeat
from harness.runtime.local_runtime import LocalRuntime, launch_server
from harness.runtime.ray_cluster import bundles
from harness.runtime.ray_worker import take_end
from harness.runtime.runtime import WorkerDied
from harness.runtime.worker_client import RemoteRole, WorkerConnection
from harness.runtime.worker_server import WorkerServer
from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.remote.client import RemoteQueue
from tests.support.project import ROOT
from tests.support.worker_roles import EchoRole, Report, Unpicklable, build_echoes, fail_to_build

TWO = {("echo", 0): EchoRole, ("echo", 1): EchoRole}
Start = Callable[..., list[RemoteRole[EchoRole]]]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRuntime]:
    logs = tmp_path_factory.mktemp("logs")
    told = {"start_timeout_s": 120, "call_timeout_s": 60, "preload": ["tests.support.worker_roles"]}
    with LocalRuntime(gpu=False, logs=logs, **told) as running:  # type: ignore[arg-type]
        yield running


@pytest.fixture
def start(runtime: LocalRuntime, request: pytest.FixtureRequest) -> Start:
    return lambda build=build_echoes, roles=TWO: runtime.start_worker(request.node.name, (), roles, build)


def is_gone(pid: int) -> bool:
    """Ended; where its parent is gone too, nobody may have taken note of that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_roles_of_one_worker_answer_from_one_process_that_has_imported_before(start: Start) -> None:
    first, second = start()
    await first.connected()
    pid = await first.role.pid()
    assert pid == await second.role.pid() == await first.connected() != os.getpid()
    assert await first.role.echo(7, times=2) == [7, 7] == await second.role.echo(value=7, times=2)
    assert await first.role.environment("OMP_NUM_THREADS") == "1"
    span = Span("a", "0", "b", 0.0, 1.0, 2, 3)
    assert await first.role.report(Report(sums={"x": 1.0}), [span]) == Report(sums={"x": 1.0}, spans=[span])


async def test_calls_run_side_by_side_and_what_is_too_long_is_refused_alone(start: Start) -> None:
    first, _ = start()
    assert await asyncio.gather(*(first.role.after(turn) for turn in (3, 2, 1, 0))) == [3, 2, 1, 0]
    assert await first.role.answered() == [0, 1, 2, 3]
    assert await asyncio.gather(*(first.role.echo(i) for i in range(500))) == [[i] for i in range(500)]
    first, _ = start()
    with pytest.raises(ValueError, match=r"a call with \d+ bytes of arguments is too long to travel"):
        await first.connection.ask(m.Call("echo[0]", "echo", m.msgspec.Raw(bytes(m.FRAME_LIMIT + 1))))
    with pytest.raises(ValueError, match=r"an answer of \d+ bytes is too long to travel"):
        await first.role.echo(2**40, times=m.FRAME_LIMIT // 8)
    assert await first.role.echo(7) == [7]


async def test_roles_of_a_worker_share_its_clock_which_is_read_before_it_is_set(start: Start) -> None:
    first, second = start()
    await first.connection.start_clock(12.5)
    assert await first.role.origin() == await second.role.origin() == 12.5
    first, _ = start()
    await first.role.move_to_a_host_with_another_clock(ahead_s=1000.0)
    before = time.monotonic()
    first.connection.here = False
    error = await first.connection.start_clock(12.5)
    assert abs(await first.role.origin() - 1012.5) <= error < time.monotonic() - before


async def test_what_is_no_call_is_refused_by_name(start: Start) -> None:
    first, _ = start()
    for name in ("_hidden", "missing"):
        with pytest.raises(AttributeError, match=name):
            getattr(first.role, name)
        with pytest.raises(AttributeError, match=name):
            await first.connection.ask(m.Call("echo[0]", name, m.msgspec.Raw(m.encode(()))))
    for name in ("plain", "untyped"):
        with pytest.raises(m.CannotTravel, match=name):
            getattr(first.role, name)
    with pytest.raises(LookupError, match=r"no role echo\[7\]; it has echo\[0\], echo\[1\]"):
        await first.connection.ask(m.Call("echo[7]", "pid", m.msgspec.Raw(m.encode(()))))
    with pytest.raises(ValueError, match="Expected `int`, got `str`"):
        await first.role.echo("seven")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="volume"):
        await first.role.echo(7, volume=3)  # type: ignore[call-arg]
    assert await first.role.echo(7) == [7]


async def test_an_exception_arrives_as_itself_and_says_where_it_was_raised(start: Start) -> None:
    """Of which kinds do: test_messages.py."""
    first, _ = start()
    with pytest.raises(ValueError, match="of the role") as known:
        await first.role.fail()
    assert "in echo[0].fail:\nTraceback" in known.value.__notes__[0]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [(fail_to_build, MemoryError, "no room for the weights"), (Unpicklable(), ModuleNotFoundError, "my_lab")],
)
async def test_roles_that_cannot_be_made_say_so(start: Start, build: Any, error: type[Exception], message: str) -> None:
    handles = start(build)
    for handle in handles:
        await handle.connected()
    for handle in handles:
        with pytest.raises(error, match=message):
            await handle.role.pid()
        assert await handle.death() is None


async def test_a_worker_that_is_killed_fails_its_calls_at_once(start: Start, runtime: LocalRuntime) -> None:
    first, second = start()
    pid = await first.role.pid()
    calls = [asyncio.create_task(call) for call in (first.role.wait(), second.role.block())]
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    for call, what in zip(calls, (r"echo\[0\] died during wait", r"echo\[1\] died during block"), strict=True):
        with pytest.raises(WorkerDied, match=f"{what}: killed by signal 9 .*; its output is in .*killed_fails.*log"):
            await call
    with pytest.raises(WorkerDied, match="died during pid: killed by signal 9"):
        await first.role.pid()
    assert await first.death() and await second.death()
    await second.end()


async def test_a_worker_that_exits_is_named_and_a_busy_one_ended(start: Start, runtime: LocalRuntime) -> None:
    first, _ = start()
    with pytest.raises(WorkerDied, match="died during exit: ended with exit code 3"):
        await first.role.exit(3)
    (only,) = runtime.start_worker("busy", (), {("echo", 0): EchoRole}, build_echoes)
    pid = await only.role.pid()
    call = asyncio.create_task(only.role.block())
    await asyncio.sleep(0)
    assert await only.death(within_s=0.1) is None
    await only.end()
    assert is_gone(pid) and await only.death()
    with pytest.raises(WorkerDied):
        await call


async def test_a_call_has_its_limit_of_time_unless_it_is_for_work(start: Start) -> None:
    first, _ = start()
    hasty = RemoteRole("echo[0]", EchoRole, first.connection, call_timeout_s=0.01)
    await first.connected()
    with pytest.raises(TimeoutError, match=r"^echo\[0\] did not answer wait within 0.01 s$"):
        await hasty.role.wait()
    assert await first.role.echo(1) == [1]
    first, _ = start()
    await first.connected()
    hasty = RemoteRole("echo[0]", EchoRole, first.connection, call_timeout_s=0.0)
    with pytest.raises(TimeoutError, match="did not answer echo within 0.0 s"):
        await hasty.role.echo(1)
    assert await hasty.role.work(7) == 7


async def test_one_role_ends_while_the_other_goes_on_then_the_worker(start: Start, runtime: LocalRuntime) -> None:
    first, second = start()
    pid = await second.role.pid()
    call = asyncio.create_task(first.role.wait())
    await asyncio.sleep(0)
    await first.end()
    with pytest.raises(WorkerDied, match=r"echo\[0\] was ended during wait"):
        await call
    with pytest.raises(WorkerDied, match=r"echo\[0\] was ended"):
        await first.role.pid()
    assert await first.death() and await second.death() is None
    assert await second.role.pid() == pid
    await second.end()
    assert is_gone(pid)


async def test_a_client_without_the_token_is_refused_before_anything_is_read(start: Start) -> None:
    first, _ = start()
    await first.connected()
    known = first.connection
    other = WorkerConnection(known.worker, known.process, b"another token", roles=["echo[0]"], start_timeout_s=60)
    with pytest.raises(PermissionError, match="refuses a client without its token"):
        await RemoteRole("echo[0]", EchoRole, other, 60).role.pid()
    address = await known.process.address()
    with socket.socket(socket.AF_UNIX) as hasty:
        hasty.connect(address.removeprefix("unix:"))
        hasty.sendall(Framer().frame(1, m.encode(m.EndRole("echo[0]"))).ljust(ANSWER))
        answer = b""
        while more := await asyncio.to_thread(hasty.recv, 4096):
            answer += more
        assert answer[STEP:] == REFUSED
    assert await first.role.echo(1) == [1]


class Here:
    """A worker's server on the loop of the test, over TCP, seen as its process is; how it died is known once it is
    asked for."""

    def __init__(self, on_left: Callable[[], None] = lambda: None) -> None:
        self.listener, _ = listen("tcp:127.0.0.1:0")
        self.server = WorkerServer("here", self.listener, b"token", on_left)
        self.serving = asyncio.create_task(self.server.serve(lambda: build_echoes([("echo", 0)])))

    def connected(self) -> RemoteRole[EchoRole]:
        connection = WorkerConnection("here", self, b"token", roles=["echo[0]"], start_timeout_s=60)
        return RemoteRole("echo[0]", EchoRole, connection, 60)

    async def address(self) -> str:
        return self.server.address

    async def death(self, within_s: float) -> str | None:
        return "it was stopped" if self.serving.done() else None

    def kill(self) -> None:
        self.server.stop()


async def test_a_server_over_tcp_answers_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.rpc.listener._STRANGERS", 1)
    here = Here()
    server, handle = here.server, here.connected()
    assert await handle.role.pid() == os.getpid()
    assert await handle.role.echo(7, times=1 << 20) == [7] * (1 << 20)
    place = here.listener.getsockname()
    with socket.create_connection(place) as silent, socket.create_connection(place) as garbled:
        garbled.sendall(bytes(ANSWER))  # no TLS; and that makes one stranger too many
        for stranger in (silent, garbled):
            assert await asyncio.to_thread(stranger.recv, 4096) == b""
    server.address = f"{server.address.partition('#')[0]}#{'0' * 64}"
    with pytest.raises(PermissionError, match="another certificate than that of its address"):
        await here.connected().connected()
    server.stop()
    await here.serving
    assert await handle.death()


async def test_no_more_strangers_stay_than_may_though_they_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.rpc.listener._STRANGERS", 3)
    here = Here()
    handle = here.connected()
    await handle.connected()
    with ExitStack() as strangers:
        for _ in range(20):  # while the loop stands still: it takes them in one turn
            strangers.enter_context(socket.create_connection(here.listener.getsockname()))
        assert await handle.role.echo(1) == [1]
        assert len(here.server.listener.strangers) <= 3 and len(here.server.clients) == 1
    here.server.stop()
    await here.serving


async def test_a_call_to_a_worker_that_just_ended_says_so_though_another_is_half_sent() -> None:
    class Unknown(Here):
        known = asyncio.Event()

        async def death(self, within_s: float) -> str | None:
            await self.known.wait()
            return "it was stopped"

    here = Unknown()
    handle = here.connected()
    await handle.connected()
    calls = [asyncio.create_task(handle.role.warn("x" * (63 << 20)))]
    await asyncio.sleep(0)
    (client,) = here.server.clients
    client.stream.close()
    stream = handle.connection._opening.result()._stream  # type: ignore[union-attr]
    while stream.is_open:  # noqa: ASYNC110
        await asyncio.sleep(0)
    calls.append(asyncio.create_task(handle.role.warn("y")))
    await asyncio.sleep(0)
    here.known.set()
    for call in calls:
        with pytest.raises(WorkerDied, match="it was stopped"):
            await call
    here.server.stop()
    await here.serving


async def test_a_server_hears_that_its_driver_left_and_a_stranger_is_none() -> None:
    left: list[str] = []

    def leave() -> None:
        left.append("driver")
        there.server.stop()

    class There(Here):
        async def death(self, within_s: float) -> str | None:
            return None

        def kill(self) -> None:
            """Its host is not to be reached."""

    there = There(leave)
    _, stranger = await asyncio.open_connection(*there.listener.getsockname())
    connection = there.connected().connection
    await connection.connected()
    stranger.close()
    await stranger.wait_closed()
    assert await connection.connected() and not left
    connection.give_up("the driver's host is lost")
    await there.serving
    assert left == ["driver"]


async def test_leaving_the_runtime_closes_roles_and_ends_busy_workers(tmp_path: Path) -> None:
    with LocalRuntime(gpu=False, start_timeout_s=60, call_timeout_s=60, logs=tmp_path) as runtime:
        runtime.stop_s = 60.0
        idle = runtime.start_worker("idle", (), TWO, build_echoes)
        pid = await idle[0].role.pid()
    assert is_gone(pid)
    assert (tmp_path / "idle.log").read_text() == "echo[0] was closed\necho[1] was closed\n"
    with LocalRuntime(gpu=False, start_timeout_s=60, call_timeout_s=60, logs=tmp_path) as runtime:
        runtime.stop_s = 0.5
        busy = runtime.start_worker("busy", (), TWO, build_echoes)
        pid = await busy[0].role.pid()
        blocked = asyncio.create_task(busy[0].role.block())
        await asyncio.sleep(0)
    assert is_gone(pid)
    with pytest.raises(WorkerDied):
        await blocked


def test_a_loop_at_its_end_asks_no_worker_how_it_ended(tmp_path: Path) -> None:
    """Where a run is broken off, the loop that closes sees the connections end, after its threads were ended."""
    troubles: list[dict[str, Any]] = []
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda loop, context: troubles.append(context))
        with LocalRuntime(gpu=False, start_timeout_s=60, call_timeout_s=60, logs=tmp_path) as runtime:
            (echo,) = runtime.start_worker("echo", (), {("echo", 0): EchoRole}, build_echoes)
            runner.run(echo.role.pid())
        loop.run_until_complete(loop.shutdown_default_executor())
        runner.run(asyncio.sleep(0.1))
    del runtime, echo  # an error that nobody asked for is told when it is forgotten
    gc.collect()
    assert not troubles


async def test_what_a_worker_logs_says_of_which_run_role_and_version_it_is(tmp_path: Path) -> None:
    logs = tmp_path / "bench" / "a_cell" / "seed=0" / "logs"
    with LocalRuntime(gpu=False, start_timeout_s=60, call_timeout_s=60, logs=logs) as runtime:
        (echo,) = runtime.start_worker("device[0]", (), {("echo", 0): EchoRole}, build_echoes)
        await echo.role.warn("the disk is slow")
    (line,) = (logs / "device[0].log").read_text().splitlines()[:1]
    told = json.loads(line)
    assert told.pop("at").endswith("+00:00")
    assert told == {
        "level": "warning",
        "run": "bench/a_cell/seed=0",
        "role": "device[0]",
        "version": 7,
        "logger": "tests.support.worker_roles",
        "message": "the disk is slow",
    }


DRIVER = """
import asyncio, sys, time
from harness.runtime.local_runtime import LocalRuntime
from tests.support.worker_roles import EchoRole, build_echoes

async def main(runtime):  # at the top of a script, without a guard: workers must not run it
    print("driver", flush=True)
    for worker in "ab":
        (echo,) = runtime.start_worker(worker, (), {("echo", 0): EchoRole}, build_echoes)
        print(await echo.role.pid(), flush=True)
    await echo.role.block()

with LocalRuntime(gpu=False, start_timeout_s=60, call_timeout_s=None) as runtime:
    asyncio.run(main(runtime))
"""


@pytest.mark.parametrize("server_stands_still", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_driver_that_is_killed_leaves_no_worker(server_stands_still: bool, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], env=environment, cwd=ROOT, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        lines = [driver.stdout.readline().decode().strip() for _ in range(3)]
        assert lines[0] == "driver"
        server = psutil.Process(int(lines[1])).parent()
        assert server is not None
        if server_stands_still:
            server.suspend()
        driver.kill()
        until = time.monotonic() + 90
        while not all(is_gone(int(pid)) for pid in lines[1:]):
            assert time.monotonic() < until
            time.sleep(0.05)
        server.resume()
        assert {*driver.stdout.read().splitlines()} <= {b"echo[0] was closed"}


MODELS = ["harness.driver.build", "engines.torch.fsdp", "engines.torch.rollout", "engines.torch.scoring"]


async def one_run(logs: Path, server: ForkServer) -> None:
    with LocalRuntime(gpu=False, start_timeout_s=60, call_timeout_s=60, logs=logs, server=server) as runtime:
        (echo,) = runtime.start_worker("worker", (), {("echo", 0): EchoRole}, build_echoes)
        print(await echo.role.pid(), flush=True)
        if logs.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def drive(logs: Path, descriptor: int) -> None:
    asyncio.run(one_run(logs, ForkServer.join(descriptor)))


def test_drivers_and_their_workers_come_from_one_server_and_workers_end_with_their_driver(tmp_path: Path) -> None:
    with closing(launch_server([__name__], log=tmp_path / "log")) as server:
        for name, end in (("whole", "ended with exit code 0"), ("killed", "killed by signal 9 (Killed)")):
            with server.share() as shared:
                driver = server.start(drive, (tmp_path / name,), [shared.fileno()], log=tmp_path / f"{name}.log")
            assert driver.wait(60) == end, (tmp_path / f"{name}.log").read_text()
            driver.close()
            worker, until = int((tmp_path / f"{name}.log").read_text()), time.monotonic() + 30
            while not is_gone(worker):
                assert time.monotonic() < until


def compute() -> None:
    while time.process_time() < 0.3:
        pass


def drive_and_watch(descriptor: int) -> None:
    server = ForkServer.join(descriptor)
    before = own_seconds(server.above)
    worker = server.start(compute, ())
    worker.wait(60)
    print(round(own_seconds(server.above) - before, 2), flush=True)  # whole ticks, which a difference of floats is not
    worker.close()


def test_what_a_server_forks_for_a_driver_that_it_forked_is_work_of_the_drivers(tmp_path: Path) -> None:
    with closing(launch_server([__name__], log=tmp_path / "log")) as server:
        with server.share() as shared:
            driver = server.start(drive_and_watch, (), [shared.fileno()], log=tmp_path / "driver.log")
        assert driver.wait(60) == "ended with exit code 0", (tmp_path / "driver.log").read_text()
        driver.close()
        assert float((tmp_path / "driver.log").read_text()) >= 0.29  # of 0.3, in ticks of 10 ms
        assert server.above == os.getpid()


def test_a_fork_server_with_a_thread_forks_nothing_and_says_so(tmp_path: Path) -> None:
    with closing(launch_server(["tests.support.worker_roles:start_a_thread"], log=tmp_path / "log")) as server:
        process = server.start(print, ("never",))
        assert (process.wait(60) or "").startswith("the server that forks it has ended: RuntimeError: a fork is not")
        process.close()


@pytest.mark.slow
def test_what_real_workers_import_leaves_one_thread(tmp_path: Path) -> None:
    preload = [*MODELS, "transformers.models.qwen3.modeling_qwen3"]
    with closing(launch_server(preload, log=tmp_path / "log")) as server:
        process = server.start(print, ("forked",), log=tmp_path / "out")
        assert process.wait(120) == "ended with exit code 0", (tmp_path / "log").read_text()
        assert (tmp_path / "out").read_text() == "forked\n"
        process.close()


def test_a_driver_may_have_a_connection_to_each_of_many_workers() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
    try:
        LocalRuntime(gpu=False, start_timeout_s=60, call_timeout_s=60)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


APART = Placement({"rollout": (0, 1, 2, 3), "actor": (4, 5, 6, 7), "actor_fwd": (4, 5, 6, 7)})
TOGETHER = Placement({"rollout": (0, 1, 2), "actor": (0, 1, 2)})


def test_what_trains_is_on_one_node_where_it_can_be_and_else_cut_where_neighbours_stay_together() -> None:
    assert bundles(APART, [2, 4]) == [(0,), (1,), (2,), (3,), (4, 5, 6, 7)]
    assert bundles(APART, [8], per_engine=2) == [(0, 1), (2, 3), (4, 5, 6, 7)]
    assert bundles(TOGETHER, [2, 2]) == [(0, 1), (2,)], "engines that share devices with training are where it is"
    four = Placement(dict.fromkeys(("rollout", "actor"), (0, 1, 2, 3)))
    assert bundles(four, [3, 3], per_engine=2) == [(0, 1), (2, 3)], "on one node each, if they have several"
    assert bundles(APART, [3, 3, 2], together=2)[4:] == [(4, 5), (6, 7)]
    assert bundles(APART, [1, 1], together=2)[4:] == [(4, 5), (6, 7)], "more nodes may come"


def test_of_a_long_output_the_end_is_taken_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    file = tmp_path / "worker.log"
    for printed, taken in ((b"whole", b"whole"), (b"beginning end", b"[8 bytes before this were left out]\ng end")):
        file.write_bytes(printed)
        assert take_end(file, 5) == taken
        assert not file.exists()


# -- stopped, not dead


LIMIT_S = 3.0


def started(runtime: LocalRuntime, name: str, *numbers: int) -> list[RemoteRole[EchoRole]]:
    return runtime.start_worker(name, (), {("echo", number): EchoRole for number in numbers}, build_echoes)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
