"""How the driver speaks to a role, wherever it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from harness.protocols import EngineDied


class WorkerDied(RuntimeError):
    """The process of a worker is gone. The message names it, and what it was doing."""


class Handle(Protocol):
    """One worker of a role."""

    name: str

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the role's coroutine method there. Its exceptions arrive as themselves. Raises WorkerDied where
        it ends without an answer."""

    async def is_dead(self, within_s: float = 5.0) -> bool:
        """Whether the worker is gone. One that is merely busy for `within_s` counts as alive."""

    async def end(self) -> None:
        """End the worker, whatever it is doing. Returns when it is gone."""


def death_in(error: BaseException) -> Exception | None:
    """The death of a worker, or of its engine, that this is all about, if it is about one."""
    if isinstance(error, BaseExceptionGroup):
        deaths = [death_in(part) for part in error.exceptions]
        return deaths[0] if None not in deaths else None
    return error if isinstance(error, WorkerDied | EngineDied) else None


async def call_all(handles: Sequence[Handle], method: str, *arguments: Any) -> list[Any]:
    """The same call on every worker at once; the first failure cancels the rest."""
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(handle.call(method, *arguments)) for handle in handles]
    return [call.result() for call in calls]
