"""The state of a rank of a training world on its way to the disk and back: the actor's and the critic's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harness.protocols import Clock, WrittenState
from harness.runtime.runtime import RealClock
from harness.weight_sync.saving import save_weights


class RememberingRole:
    """The base of a role with an engine that learns. version: of its parameters."""

    engine: Any  # that `Remembers`
    clock: Clock
    rank: int
    version: int
    _state: WrittenState | None = None

    async def copy_state(self) -> None:
        """Copy what training remembers, to be written next. Called between two batches."""
        self._state = await self.engine.state()

    async def write_state(self, folder: str) -> dict[str, tuple[int, str]]:
        """Write what was copied into a folder that is there; training goes on meanwhile. By file, bytes and SHA-256."""
        assert self._state is not None, "copy_state comes first"
        state, self._state = self._state, None
        if not isinstance(self.clock, RealClock):
            return state.write(Path(folder))
        return await asyncio.to_thread(state.write, Path(folder))

    async def load_state(self, folder: str, version: int) -> None:
        """Go on from there, where the weights were `version`; every rank calls it."""
        await self.engine.load(Path(folder))
        self.version = version

    async def save_weights(self, folder: str) -> None:
        """All weights into a folder that is there, gathered; every rank calls it, rank 0 writes."""
        save_weights(Path(folder), self.engine.named_parameters(), write=self.rank == 0)
