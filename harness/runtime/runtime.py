"""The runtime of a job, which runs its workers: handles, the clock, and why a worker's loops wait.

`virtual_runtime` runs them in this process in virtual time, `local_runtime` in processes of this machine, `ray_cluster`
in those of a cluster.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from harness.config.machine import Machine, this_machine
from harness.protocols import Clock, EngineDied

if TYPE_CHECKING:
    from harness.transfer_queue import QueueSpec, TransferQueue
from harness.transfer_queue.storage.protocol import QueueBackend

Role = TypeVar("Role")
Role_co = TypeVar("Role_co", covariant=True)
Answer = TypeVar("Answer")

RoleName = tuple[str, int]
"""A role and the number of its worker: ("actor", 0)."""
Built = Mapping[RoleName, Any]
Build = Callable[[Sequence[RoleName]], Built | Coroutine[Any, Any, Built]]
"""Makes all roles of one worker, in its process; picklable. A coroutine where it has to wait for some of them."""

_CHECKS = 20  # of progress within a stall's timeout, at least: the error comes at most 1/20 late
_LOOK_S = 10.0  # the longest time between two of them
_QUIET_S, _SLOWER = 60.0, 5  # without progress, and times as long as ever before, that are unusual
_NOBODY = "no loop, as far as they report"
_ANSWER_S = 5.0  # a loop that waits answers at once; a worker that takes longer is computing


class WorkerDied(RuntimeError):
    """The process of a worker is gone. The message names it, and what it was doing."""


class Stalled(TimeoutError):
    """Raised where nothing happened for too long."""


class Handle(Protocol[Role_co]):
    """One role of a job, wherever it runs."""

    @property
    def name(self) -> str:
        """Such as `actor[0]`."""

    @property
    def role(self) -> Role_co:
        """The role itself where it is in this process, else a proxy of its type, whose coroutines are carried out
        there. Their exceptions arrive as themselves; WorkerDied where a call ends without an answer, TimeoutError where
        none comes in time."""

    async def death(self, within_s: float = 5.0) -> str | None:
        """How its worker ended; None while it is there. One that is merely busy for `within_s` counts as alive."""

    async def end(self) -> None:
        """End it, whatever it is doing, and its worker too unless that has other roles. Returns when it is gone."""


Storage = Callable[[], QueueBackend]
"""Opens the storage of a queue, in the process that starts the queue."""


class Runtime(Protocol):
    """Starts workers and the queue between them."""

    @property
    def host(self) -> str:
        """The host where processes of this run reach this one; loopback unless they are on several machines."""

    def host_of(self, handle: Handle[Any]) -> str:
        """The host where they reach the process of this role, which has answered."""

    def start_queue(self, spec: QueueSpec, saves: Path | None = None, storage: Storage | None = None) -> TransferQueue:
        """Start the queue. saves: the folder below which it may be saved; storage: where rows rest, as this runtime
        does unless given."""

    def kill_queue(self) -> None:
        """Kill the queue's process, whatever it is doing."""

    def start_worker(
        self, name: str, devices: Sequence[int], roles: Mapping[RoleName, type], build: Build
    ) -> list[Handle[Any]]:
        """Start a worker on these devices, or without one. It makes `roles`, each of this class. Their handles, in the
        same order, which wait for it when they are first used."""

    async def start_again(self, handle: Handle[Any]) -> None:
        """End the worker that this role is in, whatever it is doing, and start it anew in the same place, with all of
        its roles: every handle on one of them is on the new one from then on. Returns when they are made, and count
        the time that the others do. Raises WorkerDied, or what keeps them from being made."""

    async def stop_clocks(self) -> float:
        """Have the clocks of all workers stand still until they are started again. The latest of their times."""

    async def start_clocks(self, clock: RealClock) -> None:
        """Have the clocks of all workers count the time of this one, which comes to know how far they may be off."""


def cluster_address() -> str | None:
    """Address of the Ray cluster that RAY_ADDRESS names; None where it names none, and all is on this machine."""
    return os.environ.get("RAY_ADDRESS") or None


def role_name(role: RoleName) -> str:
    """Name of a role: its kind and its number."""
    return f"{role[0]}[{role[1]}]"


async def ask_all(handles: Iterable[Handle[Role]], ask: Callable[[Role], Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """The same of every role at once; the first failure cancels the rest."""
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(handle.role)) for handle in handles]
    return [task.result() for task in asked]


def parts_of(error: Exception) -> Iterator[Exception]:
    """The errors that a group of errors consists of; of any other error itself."""
    if isinstance(error, ExceptionGroup):
        for part in error.exceptions:
            yield from parts_of(part)
    else:
        yield error


def death_in(error: Exception) -> Exception | None:
    """The death of a worker, or of its engine, if this error consists of nothing else."""
    parts = list(parts_of(error))
    return parts[0] if all(isinstance(part, WorkerDied | EngineDied) for part in parts) else None


def retrieved(task: asyncio.Future[Any]) -> None:
    """Callback for add_done_callback: whoever waits for this hears its error, and where nobody does it is no error."""
    if not task.cancelled():
        task.exception()


class RealClock:
    """Seconds since `origin`, a reading of time.monotonic.

    All processes of one host share that clock, so one origin gives them one time axis; `Runtime.start_clocks` makes it
    that of other hosts, too. uncertainty_s: by which times of those may be off, at most.
    """

    @classmethod
    def starting_now(cls) -> RealClock:
        """A clock that shows 0 now."""
        return cls(time.monotonic())

    def __init__(self, origin: float) -> None:
        self.origin, self.uncertainty_s = origin, 0.0
        self._stopped_at: float | None = None

    def now(self) -> float:
        return time.monotonic() - self.origin if self._stopped_at is None else self._stopped_at

    def stop(self) -> float:
        """Stop the clock until it is started; returns its time."""
        self._stopped_at = self.now()
        return self._stopped_at

    def start(self, origin: float) -> None:
        """Start it; origin: monotonic time at which it showed 0."""
        self.origin, self._stopped_at = origin, None

    def restart(self, now: float = 0.0) -> None:
        """Start it so that it shows `now`."""
        self.start(time.monotonic() - now)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


Method = TypeVar("Method", bound=Callable[..., Any])


def open_ended(method: Method) -> Method:
    """A call of a role that lasts as long as there is work, or until there is some: no limit of time ends the wait for
    its answer, but its worker's death does, and a run in which nothing goes on."""
    method.open_ended = True  # type: ignore[attr-defined]
    return method


# -- stalls: a run in which nothing happens is an error, and says what every loop waits for


class Waits:
    """The waits of each loop of `owner` at the moment. more: lines of waits that are known elsewhere, by owner."""

    def __init__(self, owner: str, more: Callable[[str], Sequence[str]] = lambda owner: ()) -> None:
        self.owner, self._more = owner, more
        self._waits: dict[int, str] = {}
        self._count = 0

    @contextmanager
    def __call__(self, loop: str, what: str) -> Iterator[None]:
        """Note one wait while inside: `loop` (its name within the owner) waits for `what`."""
        self._count += 1
        number = self._count
        self._waits[number] = f"{self.owner}.{loop} waits for {what}"
        try:
            yield
        finally:
            del self._waits[number]

    def lines(self) -> list[str]:
        """Lines, one for each waiting loop, the longest wait first."""
        return [*self._waits.values(), *self._more(self.owner)]


async def watch_progress(
    progress: Callable[[], Awaitable[object]],
    waiting: Callable[[], Awaitable[Sequence[str]]],
    timeout_s: float,
    clock: Clock,
    *,
    tell: Callable[[str], None] = lambda line: None,
    leave: Callable[[], bool] = lambda: False,
) -> NoReturn:
    """Raises Stalled, with what is `waiting`, once `progress` has not changed for `timeout_s`. Runs beside the job, and
    is cancelled when that ends.

    `tell` hears of it once nothing has changed for a minute, and for five times as long as ever before; a job that
    `leave` says was asked to end is not waited for any longer than that.
    """
    period = min(timeout_s / _CHECKS, _LOOK_S)
    seen, quiet, longest, told = await progress(), 0, 0, False  # checks, not times: a clock may stand still
    while True:
        await clock.sleep(period)
        if (figure := await progress()) != seen:
            seen, quiet, longest, told = figure, 0, max(longest, quiet), False
            continue
        quiet += 1
        unusual = quiet * period >= _QUIET_S and quiet >= _SLOWER * (longest + 1)
        if quiet * period < timeout_s and not (unusual and (leave() or not told)):
            continue
        said = f"nothing happened for {quiet * period:g} s; waiting: {'; '.join(await waiting()) or _NOBODY}"
        if quiet * period >= timeout_s:
            raise Stalled(said)
        if leave():
            raise Stalled(f"SIGTERM asked to leave, and {said}")
        tell(said)
        told = True


class WaitingRole(Protocol):
    """Every role."""

    async def progress(self) -> int:
        """Amount that it has computed so far, in units of its own: a role that makes progress has another number."""

    async def waiting(self) -> list[str]:
        """Lines on what its loops wait for."""


async def collect_waits(handles: Sequence[Handle[WaitingRole]]) -> list[str]:
    """Lines on what the loops of these roles wait for. One that computes cannot answer: the line says so."""

    async def waits_of(handle: Handle[WaitingRole]) -> list[str]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await handle.role.waiting()
        except TimeoutError:
            return [f"{handle.name} does not answer (computing, or dead)"]
        except WorkerDied:
            return [f"{handle.name} is dead"]

    return [line for lines in await asyncio.gather(*map(waits_of, handles)) for line in lines]


class Progress:
    """The progress of these roles, together: equal as long as none of them computes anything.

    One that computes cannot answer meanwhile: its answer counts when it comes, and it is not asked again before. One
    that is dead is for others to notice. To be closed.
    """

    def __init__(self, handles: Sequence[Handle[WaitingRole]]) -> None:
        self._handles = handles
        self._known: dict[str, int] = {}
        self._asked: dict[str, asyncio.Task[None]] = {}

    async def now(self) -> tuple[tuple[str, int], ...]:
        """Progress by role, as last heard."""
        fresh = []
        for handle in self._handles:
            asked = self._asked.get(handle.name)
            if asked is None or asked.done():
                self._asked[handle.name] = asyncio.create_task(self._ask(handle))
                fresh.append(self._asked[handle.name])
        await asyncio.wait(fresh or self._asked.values(), timeout=_ANSWER_S)  # once for one that is silent
        for task in self._asked.values():
            if task.done():
                task.result()
        return tuple(sorted(self._known.items()))

    async def _ask(self, handle: Handle[WaitingRole]) -> None:
        with suppress(TimeoutError, WorkerDied):
            self._known[handle.name] = await handle.role.progress()

    def close(self) -> None:
        """Waits for no answer any more."""
        for asked in self._asked.values():
            asked.cancel()


def machine_of_runs() -> Machine:
    """The machine of runs: this one, or the cluster that RAY_ADDRESS names. Raises ConfigError where that does not let
    us in."""
    if (address := cluster_address()) is None:
        return this_machine()
    from harness.runtime.ray_cluster import cluster_machine

    return cluster_machine(address)
