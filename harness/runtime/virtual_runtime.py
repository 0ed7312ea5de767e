"""The virtual runtime: every worker of a job in this process, on an event loop that never waits. When nothing is ready,
its clock jumps to the next timer."""

import asyncio
import gc
import math
import selectors
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from heapq import heappush
from itertools import count
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, TypeVarTuple

from harness.config.fields import some
from harness.runtime.runtime import Build, Handle, RealClock, Role, RoleName, Storage, role_name
from harness.transfer_queue import QueueSpec, TransferQueue
from harness.transfer_queue.local import LocalQueue

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Deadlock(RuntimeError):
    """Raised where nothing can run and nothing is due. The message says what waits for what."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop for asyncio.Runner(loop_factory=VirtualLoop). Time starts at 0 and passes only while everything
    waits.

    `explain` may be set to what a Deadlock says besides the tasks: a line per wait, found without awaiting. Replaces
    only the clock and the selector of asyncio, and relies on `_scheduled` being its heap of timers, as it is
    in CPython 3.11 and 3.12.
    """

    _scheduled: list[Any]
    _ready: Any

    def __init__(self) -> None:
        super().__init__()
        self.explain: Callable[[], Iterable[str]] = list
        self._now = 0.0
        self._numbers = count()
        self._selector = _Jump(self)
        self._clock_resolution = math.ulp(0.0)

    def time(self) -> float:
        """Seconds that have passed on it."""
        return self._now

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Timers of the same time run in the order in which they were set."""
        timer = _Timer(when, callback, args, self, context)
        timer.number, timer._scheduled = next(self._numbers), True
        heappush(self._scheduled, timer)
        return timer

    def passes(self, when: float) -> bool:
        """Go to this time, if nothing runs before it or then; whether nothing did."""
        if self._ready or (self._scheduled and self._scheduled[0]._when <= when):
            return False
        self._now = when
        return True

    def jump(self) -> None:
        """Go to the next timer. Raises Deadlock where there is none."""
        if not self._scheduled:
            raise Deadlock(self._explanation())
        self._now = max(self._now, self._scheduled[0]._when)
        # asyncio runs timers due before now + resolution: the next number above now, so that timers of the same time
        # run together, others do not, and none is missed however late it is.
        self._clock_resolution = math.ulp(self._now)

    def run_until_complete(self, future: Any) -> Any:
        """Run the main task; after a Deadlock it is cancelled first, so that it takes its own tasks down, in its order;
        the runner cancels those that are left."""
        main = asyncio.ensure_future(future, loop=self)
        try:
            return super().run_until_complete(main)
        except Deadlock as deadlock:
            main.cancel()
            (end,) = super().run_until_complete(asyncio.gather(main, return_exceptions=True))
            if not isinstance(end, asyncio.CancelledError):
                deadlock.add_note(f"and then, while the run was taken down: {end!r}")
            raise

    def _explanation(self) -> str:
        lines = [*self.explain(), *waiting_tasks(self)]
        return "\n  ".join([f"nothing can run and nothing is due at {self._now:g} s of simulated time:", *lines])

    def _process_events(self, events: object) -> None:
        """Do nothing: there is no I/O."""

    def _write_to_self(self) -> None:
        """The selector never sleeps, so it need not be woken."""


class _Timer(asyncio.TimerHandle):
    __slots__ = ("number",)
    number: int
    _scheduled: bool
    _when: float

    def __lt__(self, other: Any) -> bool:
        ours, theirs = self._when, other._when
        return ours < theirs or (ours == theirs and bool(self.number < other.number))


class _Jump(selectors.BaseSelector):
    """The selector of a loop that never waits. timeout None: nothing is ready and no timer is set."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._loop.jump()
        return []

    def register(self, fileobj: object, events: int, data: object = None) -> NoReturn:
        _refuse()

    def unregister(self, fileobj: object) -> NoReturn:
        _refuse()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


def _refuse(*arguments: object, **options: object) -> NoReturn:
    raise RuntimeError(
        "a virtual clock cannot wait for threads, sockets or processes: time would jump past what they do; "
        "compute in the coroutine, or use the real clock"
    )


for _name in (
    *("run_in_executor", "getaddrinfo", "getnameinfo", "subprocess_exec", "subprocess_shell"),
    *("create_connection", "create_server", "create_datagram_endpoint", "create_unix_connection", "create_unix_server"),
    *("connect_accepted_socket", "connect_read_pipe", "connect_write_pipe", "add_reader", "add_writer", "sendfile"),
    *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_sendall", "sock_sendto", "sock_connect", "sock_accept"),
):
    setattr(VirtualLoop, _name, _refuse)


class VirtualClock:
    """`harness.protocols.Clock` of a loop: seconds of its time since the clock was made, or restarted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.origin = loop.time()

    def now(self) -> float:
        return self._loop.time() - self.origin

    def restart(self, now: float = 0.0) -> None:
        """Let the clock show `now`."""
        self.origin = self._loop.time() - now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(main: Coroutine[Any, Any, T], explain: Callable[[], Iterable[str]] = list) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock, after cancelling all tasks, where no task can ever go on."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        loop.explain = explain
        return runner.run(main)


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    """A line for each place where unfinished tasks stand: which tasks, and the coroutines that led there."""
    standing: dict[str, list[str]] = {}
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for name, task in sorted(((task.get_name(), task) for task in tasks), key=lambda pair: (len(pair[0]), pair[0])):
        standing.setdefault(" > ".join(_chain(task.get_coro())), []).append(name)
    return [f"{some(names)}: {chain}" for chain, names in standing.items()]


def _chain(awaiting: Any) -> list[str]:
    """Names of the coroutines that wait for each other, outermost first, up to the future (or generator) at the end."""
    names = []
    while (name := getattr(awaiting, "__qualname__", None)) is not None:
        names.append(name)
        awaiting = getattr(awaiting, "cr_await", None)
    return names


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Meanwhile Python collects garbage rarely: a simulation makes many objects that live to its end, and scanning them
    again and again is a seventh of its time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class LocalRole(Generic[Role]):
    """A Handle on a role in this process: a call takes no time to get there, and nothing is copied."""

    def __init__(self, name: str, role: Role) -> None:
        self.name, self.role = name, role

    async def death(self, within_s: float = 5.0) -> None:
        """Never: it would have taken this process with it."""

    async def end(self) -> None:
        """Do nothing: nothing dies here."""


class VirtualRuntime:
    """`harness.runtime.runtime.Runtime` without processes."""

    host = "this process"

    def __init__(self) -> None:
        self._workers: list[tuple[list[LocalRole[Any]], list[RoleName], Build]] = []

    def host_of(self, handle: Handle[Any]) -> str:
        return self.host

    def start_queue(self, spec: QueueSpec, saves: Path | None = None, storage: Storage | None = None) -> TransferQueue:
        return LocalQueue(spec)

    def kill_queue(self) -> None:
        raise NotImplementedError("the queue is in this process, and nobody watches it")

    def start_worker(
        self, name: str, devices: Sequence[int], roles: Mapping[RoleName, type], build: Build
    ) -> list[Handle[Any]]:
        """Make the roles here."""
        made = build(list(roles))
        assert isinstance(made, Mapping), "nothing here waits for a device"
        handles = [LocalRole(role_name(role), made[role]) for role in roles]
        self._workers.append((handles, list(roles), build))
        return list(handles)

    async def start_again(self, handle: Handle[Any]) -> None:
        """Make its roles anew; a worker's start takes no time here."""
        handles, roles, build = self._worker_of(handle)
        made = build(roles)
        assert isinstance(made, Mapping), "nothing here waits for a device"
        for role, name in zip(handles, roles, strict=True):
            role.role = made[name]

    def _worker_of(self, handle: Handle[Any]) -> tuple[list[LocalRole[Any]], list[RoleName], Build]:
        """Handles on all roles of the worker that has this one, their names, and what makes them."""
        return next(one for one in self._workers if handle.name in {role.name for role in one[0]})

    async def stop_clocks(self) -> float:
        """Do nothing: nothing stops the clock of the loop, and nothing asks for it."""
        raise RuntimeError("a virtual clock cannot be stopped")

    async def start_clocks(self, clock: RealClock) -> None:
        """All have the clock of the loop."""
