"""Workers of a simulated run as if they were processes: they can die, stand still, be slow, and get weights in part.

All of a worker is in this process; what makes it one of its own is that calls come to it, and leave it for the queue,
over edges. What crosses an edge in one direction keeps its order, however long each takes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from harness.driver.build import WorkerSpec
from harness.protocols import TransferError
from harness.runtime.runtime import Build, Handle, RoleName, Storage, WorkerDied, role_name
from harness.runtime.virtual_runtime import LocalRole, VirtualRuntime
from harness.transfer_queue import Batch, GetRequest, QueueSpec, TransferQueue
from harness.transfer_queue.local import LocalQueue

DRIVER = "driver"
_START_S = 2.0  # at most; a batch takes about one
_RECEIVES = ("load", "stage")


class Edge:
    """A direction of a process's traffic: what is under way arrives in its order."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._under_way = 0
        self._order = asyncio.Lock()

    async def cross(self) -> None:
        """Pass the edge: at once, unless the process is slow or stands still, or something before it is under way."""
        if not (self._under_way or self._process.hindered):
            return
        self._under_way += 1
        try:
            async with self._order:
                await self._process.pass_on()
        finally:
            self._under_way -= 1


class Process:
    """A process of a simulated run. died: how, once it has. Thirteen attributes: ways to hinder it, and four edges."""

    def __init__(self, name: str, random: Random) -> None:
        self.name, self.died = name, ""
        self.torn_transfers = 0
        """Number of the next transfers to here that break off, before anything came or in the middle."""
        self._random = random
        self._running = asyncio.Event()
        self._running.set()
        self._slow_until, self._slow_s = 0.0, 0.0
        self._calls: dict[asyncio.Task[Any], str] = {}  # with whose they are
        self._ended: dict[str, str] = {}
        self.inward, self.outward = Edge(self), Edge(self)
        self.asking, self.answered = Edge(self), Edge(self)

    @property
    def hindered(self) -> bool:
        """Whether the process is slow or stands still."""
        return not self._running.is_set() or asyncio.get_running_loop().time() < self._slow_until

    async def pass_on(self) -> None:
        """Wait until the process does what is next at one edge."""
        await self._running.wait()
        if asyncio.get_running_loop().time() < self._slow_until:
            await asyncio.sleep(self._random.uniform(0.0, self._slow_s))

    def die(self, how: str) -> None:
        """End the process in the middle of all it does."""
        if not self.died:
            self.died = how
            for call in self._calls:
                call.cancel()

    def end_role(self, role: str, roles: Sequence[str]) -> None:
        """End one of its roles in the middle of all that it does; the last one ends the process."""
        self._ended[role] = "it was ended"
        if self._ended.keys() >= set(roles):
            self.die("it was ended")
        for call in [call for call, whose in self._calls.items() if whose == role]:
            call.cancel()

    def end_of(self, role: str) -> str:
        """How a role of it ended; empty while it is there."""
        return self.died or self._ended.get(role, "")

    def stand_still(self, seconds: float) -> None:
        """Stand still for so many seconds, and go on."""
        self._running.clear()
        asyncio.get_running_loop().call_later(seconds, self._running.set)

    def be_slow(self, seconds: float, most_s: float) -> None:
        """Be slow for so many seconds: whatever crosses an edge takes up to `most_s`."""
        self._slow_until, self._slow_s = asyncio.get_running_loop().time() + seconds, most_s

    async def carry_out(self, role: str, method: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """A call from the driver, until it is answered. Raises WorkerDied where the process is dead, or dies."""
        if how := self.end_of(role):
            raise WorkerDied(f"{role} died before {method}: {how}")
        caller = asyncio.current_task()
        assert caller is not None, "a call is made by a task"
        given_up, call = caller.cancelling(), asyncio.create_task(self._answer(work))
        self._calls[call] = role
        try:
            return await call
        except asyncio.CancelledError:
            if caller.cancelling() > given_up or not (how := self.end_of(role)):
                raise
            raise WorkerDied(f"{role} died during {method}: {how}") from None
        finally:
            del self._calls[call]

    async def _answer(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        await self.inward.cross()
        answer = await work()
        await self.outward.cross()
        return answer


class FaultyRole(LocalRole[Any]):
    """A Handle on a role of a simulated process, which has all of `roles`."""

    def __init__(self, name: str, made: Any, process: Process, roles: Sequence[str]) -> None:
        self.begin(made, process)
        self._roles = roles
        super().__init__(name, _Called(self))

    def begin(self, made: Any, process: Process) -> None:
        """Put the role into this process."""
        self.made, self.process = made, process

    async def death(self, within_s: float = 5.0) -> str | None:  # type: ignore[override]  # here there are deaths
        return self.process.end_of(self.name) or None

    async def end(self) -> None:
        self.process.end_role(self.name, self._roles)


class _Called:
    """A stand-in for a role, whose coroutine functions are calls of its process."""

    def __init__(self, handle: FaultyRole) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        handle = self._handle
        if not asyncio.iscoroutinefunction(getattr(handle.made, name)):
            return getattr(handle.made, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            work = partial(getattr(handle.made, name), *arguments, **named)
            if name in _RECEIVES:
                work = partial(self._receive, name, work)
            return await handle.process.carry_out(handle.name, name, work)

        return call

    async def _receive(self, method: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Weights, which may break off. Raises TransferError."""
        process, role = self._handle.process, self._handle.made
        if not process.torn_transfers:
            return await work()
        process.torn_transfers -= 1
        if method == "load" and process.torn_transfers % 2:
            receiver, role.receiver = role.receiver, _TornReceiver(role.receiver)
            try:
                return await work()
            finally:
                role.receiver = receiver
        raise TransferError(f"{self._handle.name} got nothing")


class _TornReceiver:
    """A `WeightReceiver` whose weights break off."""

    def __init__(self, receiver: Any) -> None:
        self._receiver = receiver

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._receiver.receive(version)
        raise TransferError(f"version {version} broke off")


class FaultyQueue(LocalQueue):
    """The queue of a simulated run, in a process of its own. Each client has a view of it, by its edges."""

    def __init__(self, spec: QueueSpec, process: Process, client: Process) -> None:
        super().__init__(spec)
        self._own, self._client = process, client

    def seen_from(self, client: Process) -> FaultyQueue:
        """The same queue."""
        view = copy.copy(self)
        view._client = client
        return view

    async def _asked(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Raises ConnectionError where the queue is dead, or dies over it; what a dead client asks is not heard."""
        await self._client.asking.cross()
        if self._client.died:
            raise asyncio.CancelledError
        try:
            return await self._own.carry_out("the transfer queue", "a call", work)
        except WorkerDied as death:
            raise ConnectionError(f"the transfer queue has ended: {death}") from None

    async def get_batch(self, request: GetRequest) -> Batch | None:
        """Take rows as `TransferQueue.get_batch`. Rows that nobody waits for any more go back, as from afar."""
        handed: list[Batch | None] = []

        async def get() -> None:
            handed.append(await super(FaultyQueue, self).get_batch(request))

        try:
            await self._asked(get)
            await self._client.answered.cross()
        except BaseException:
            if not self._client.died:
                for batch in handed:
                    if batch is not None:
                        self._service.give_back(batch.lease)
            raise
        return handed[0]


def _over_an_edge(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    method = getattr(LocalQueue, name)

    async def call(self: FaultyQueue, *arguments: Any, **named: Any) -> Any:
        answer = await self._asked(partial(method, self, *arguments, **named))
        await self._client.answered.cross()
        return answer

    return call


for _name in ("create_partition", "put", "set_bound", "drop", "begin_again", "acknowledge", "give_back", "release"):
    setattr(FaultyQueue, _name, _over_an_edge(_name))
for _name in ("clear", "clear_finished", "waiting", "close", "describe", "save"):
    setattr(FaultyQueue, _name, _over_an_edge(_name))


class FaultyRuntime(VirtualRuntime):
    """Makes workers as processes; processes: all of them, by name, with the queue's and the driver's."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self.processes = {DRIVER: Process(DRIVER, random)}
        self._queue: FaultyQueue | None = None

    def start_queue(self, spec: QueueSpec, saves: Path | None = None, storage: Storage | None = None) -> TransferQueue:
        process = self.processes["queue"] = Process("queue", self._random)
        self._queue = FaultyQueue(spec, process, self.processes[DRIVER])
        return self._queue

    def start_worker(
        self, name: str, devices: Sequence[int], roles: Mapping[RoleName, type], build: Build
    ) -> list[Handle[Any]]:
        process, made = self._begun(name, list(roles), build)
        names = [role_name(role) for role in roles]
        handles = [FaultyRole(role_name(role), made[role], process, names) for role in roles]
        self._workers.append((list(handles), list(roles), build))
        return list(handles)

    async def start_again(self, handle: Handle[Any]) -> None:
        """Start a role again in another process, which takes some time."""
        assert isinstance(handle, FaultyRole)
        handles, roles, build = self._worker_of(handle)
        handle.process.die("it was ended")
        await asyncio.sleep(self._random.uniform(0.0, _START_S))
        process, made = self._begun(handle.process.name, roles, build)
        for role, one in zip(roles, handles, strict=True):
            assert isinstance(one, FaultyRole)
            one.begin(made[role], process)

    def _begun(self, name: str, roles: list[RoleName], build: Build) -> tuple[Process, Mapping[RoleName, Any]]:
        """A new process and its roles, with a view of the queue of its own."""
        process = self.processes[name] = Process(name, self._random)
        assert self._queue is not None and isinstance(build, partial)
        spec: WorkerSpec = build.keywords["spec"]
        made = build.func(roles, spec=replace(spec, queue=self._queue.seen_from(process)))
        assert isinstance(made, Mapping), "nothing here waits for a device"
        return process, made
