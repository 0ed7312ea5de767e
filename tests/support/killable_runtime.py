"""Simulated runs whose workers are killed, and may be started again, at times that a test says."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from harness.config import JobConfig
from harness.driver.recorder import Recorder
from harness.driver.session import Session, simulate
from harness.runtime.runtime import Build, Handle, RoleName
from harness.runtime.virtual_runtime import VirtualRuntime
from tests.support.engine_events import KillableHandle, plan


@dataclass(frozen=True)
class Death:
    """A worker is killed at a time, in seconds of the run. start_s: that its next start lasts."""

    at: float
    worker: str
    start_s: float = 0.0


class KillableRuntime(VirtualRuntime):
    def __init__(self) -> None:
        super().__init__()
        self.killable: dict[str, list[KillableHandle]] = {}
        self.start_s: dict[str, float] = {}

    def start_worker(
        self, name: str, devices: Sequence[int], roles: Mapping[RoleName, type], build: Build
    ) -> list[Handle[Any]]:
        self.killable[name] = [KillableHandle(handle) for handle in super().start_worker(name, devices, roles, build)]
        return list(self.killable[name])

    async def start_again(self, handle: Handle[Any]) -> None:
        ((worker, handles),) = [item for item in self.killable.items() if handle in item[1]]
        await asyncio.gather(*(one.end() for one in handles))
        await asyncio.sleep(self.start_s.get(worker, 0.0))
        await super().start_again(handle)
        for one in handles:
            one.dead = False

    def kill(self, death: Death) -> None:
        """The worker of this name, or that has a role of this name."""
        (killed,) = (name for name, roles in self.killable.items() if death.worker in (name, *(r.name for r in roles)))
        self.start_s[killed] = death.start_s
        for handle in self.killable[killed]:
            handle.die()


def simulate_killed(config: JobConfig, seed: int, deaths: Sequence[Death]) -> Recorder:
    """Run on the virtual clock while these workers are killed: "host", or an engine by its name."""

    def prepare(session: Session) -> None:
        runtime: Any = session.backend.runtime
        plan(session, [(death.at, partial(runtime.kill, death)) for death in deaths])

    with patch("harness.driver.backends.VirtualRuntime", KillableRuntime):
        return simulate(config, seed, started=prepare)
