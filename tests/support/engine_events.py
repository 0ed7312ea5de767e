"""Engines of a simulated run that die, leave and come back when a test says so."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.config import JobConfig, RestartsConfig
from harness.driver.recorder import Recorder
from harness.driver.session import Session, simulate
from harness.runtime.runtime import Handle, WorkerDied
from harness.weight_sync.membership import Fleet, MembershipConflict
from tests.support.proxies import Proxy


class KillableHandle:
    """`harness.runtime.runtime.Handle` on a role in this process, which stops in the middle of all it does."""

    def __init__(self, handle: Handle[Any]) -> None:
        self.name, self._handle = handle.name, handle
        self.role: Any = Proxy(self._call)
        self.dead = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._killed: set[asyncio.Task[Any]] = set()  # of them; they end a moment later, when it may be alive again

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self.dead:
            raise WorkerDied(f"{self.name} died before {method}")
        call = asyncio.create_task(getattr(self._handle.role, method)(*arguments))
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if call not in self._killed:
                raise
            raise WorkerDied(f"{self.name} died during {method}") from None
        finally:
            self._calls.discard(call)
            self._killed.discard(call)

    async def death(self, within_s: float = 5.0) -> str | None:
        return "it died" if self.dead else None

    async def end(self) -> None:
        self.die()
        if self._killed:
            await asyncio.wait(self._killed)

    def die(self) -> None:
        self.dead = True
        self._killed |= self._calls
        for call in self._calls:
            call.cancel()


Prepare = Callable[[Session], None]


@dataclass(frozen=True)
class Event:
    """What happens to an engine at a time, in seconds of the run."""

    at: float
    engine: int
    what: str  # "dies", or what it is asked: "leave", "join"


def simulate_with(config: JobConfig, seed: int, events: Sequence[Event], started: Prepare) -> Recorder:
    """Run on the virtual clock while these things happen to engines; none is started again."""
    config = replace(config, restarts=RestartsConfig(limit=0))

    def prepare(session: Session) -> None:
        started(session)
        fleet = session.assembly.job.rollout.fleet
        for name, handle in list(fleet._handles.items()):
            fleet._handles[name] = KillableHandle(handle)
        plan(session, [(event.at, partial(happen, fleet, event)) for event in events])

    return simulate(config, seed, started=prepare)


def plan(session: Session, events: Sequence[tuple[float, Callable[[], None]]]) -> None:
    """These things happen at their times, in seconds of the run."""
    prompts = session.assembly.job.prompts
    admit = prompts.admit  # the first thing that any schedule does

    async def first(below: int) -> None:
        prompts.admit = admit  # type: ignore[method-assign]
        for at, what in events:
            asyncio.get_running_loop().call_later(at, what)
        await admit(below)

    prompts.admit = first  # type: ignore[method-assign]


def happen(fleet: Fleet[Any], event: Event) -> None:
    name = f"rollout[{event.engine}]"
    if event.what == "dies":
        engine = fleet._handles[name]
        assert isinstance(engine, KillableHandle)
        engine.die()
    else:
        with suppress(MembershipConflict):  # it has not left yet, or never will
            fleet.membership.request(name, event.what)  # type: ignore[arg-type]
