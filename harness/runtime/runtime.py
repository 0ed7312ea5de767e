"""Where the workers of a job run: what assembling one asks of a runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from harness.runtime.handles import Handle
from harness.transfer_queue import QueueSpec, TransferQueue


class Runtime(Protocol):
    """Starts workers and the queue between them."""

    @property
    def host(self) -> str:
        """Where processes of this run meet; loopback unless they are on several machines."""

    def start_queue(self, spec: QueueSpec) -> TransferQueue: ...

    def start(self, role: str, number: int, build: Callable[..., Any], **arguments: Any) -> Handle:
        """Start worker `number` of a role on its device; `build(number=number, **arguments)` makes it there."""
