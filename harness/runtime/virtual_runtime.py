"""The virtual runtime: every worker of a job in this process, on one event loop."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness.transfer_queue import LocalQueue, QueueSpec, TransferQueue


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Python looks for garbage seldom meanwhile: a simulation makes many objects that live to its end, and looking
    through them again and again is a seventh of its time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class LocalRole:
    """A Handle on a role in this process.

    A call is the role's own coroutine: it takes no time to get there, and what it takes and returns is not copied.
    """

    def __init__(self, name: str, role: Any) -> None:
        self.name, self.role = name, role

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self.role, method)(*arguments)

    async def is_dead(self, within_s: float = 5.0) -> bool:
        """Never: it would have taken this process with it."""
        return False

    async def end(self) -> None:
        """Nothing dies here."""


class VirtualRuntime:
    """`harness.runtime.runtime.Runtime` without processes."""

    host = "this process"

    def start_queue(self, spec: QueueSpec) -> TransferQueue:
        return LocalQueue(spec)

    def start(self, role: str, number: int, build: Callable[..., Any], **arguments: Any) -> LocalRole:
        """Make worker `number` of a role here: `build(number=number, **arguments)`."""
        return LocalRole(f"{role}[{number}]", build(number=number, **arguments))
