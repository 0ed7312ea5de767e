"""Roles for tests of workers: small ones, in a module that workers can import."""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from harness.protocols import Span
from harness.runtime import worker_server
from harness.runtime.runtime import RealClock, RoleName, open_ended


@dataclass
class Report:
    sums: dict[str, float]
    spans: list[Span] = field(default_factory=list)


class EchoRole:
    def __init__(self, number: int, clock: RealClock | None = None) -> None:
        self.number, self.clock = number, clock or RealClock(0.0)
        self.order: list[int] = []

    async def pid(self) -> int:
        return os.getpid()

    async def warn(self, what: str) -> None:
        self.version = 7
        logging.getLogger(__name__).warning("%s", what)

    async def waiting(self) -> list[str]:
        return [f"echo[{self.number}] waits for calls"]

    async def echo(self, value: int, *, times: int = 1) -> list[int]:
        return [value] * times

    async def report(self, report: Report, spans: list[Span]) -> Report:
        report.spans += spans
        return report

    async def after(self, turn: int) -> int:
        """Later turns answer first."""
        await asyncio.sleep(0.02 * turn)
        self.order.append(turn)
        return turn

    @open_ended
    async def work(self, value: int) -> int:
        return value

    async def answered(self) -> list[int]:
        return self.order

    async def origin(self) -> float:
        return self.clock.origin

    async def move_to_a_host_with_another_clock(self, ahead_s: float) -> None:
        worker_server.time = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)  # type: ignore[assignment]

    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    async def imported(self, module: str) -> bool:
        return module in sys.modules

    async def fail(self) -> None:
        raise ValueError("of the role")

    async def block(self, until: str = "/never") -> str:
        """The whole process, as a collective would, until this file is there."""
        while not os.path.exists(until):  # noqa: ASYNC240
            time.sleep(0.01)  # noqa: ASYNC251
        return until

    async def wait(self) -> None:
        await asyncio.sleep(3600)

    async def exit(self, code: int) -> None:
        os._exit(code)

    async def untyped(self, value):  # type: ignore[no-untyped-def]
        return value

    async def _hidden(self) -> int:
        return 1

    def plain(self) -> int:
        return 1

    def close(self) -> None:
        print(f"echo[{self.number}] was closed")


def build_echoes(roles: Sequence[RoleName]) -> Mapping[RoleName, object]:
    clock = RealClock(0.0)
    return {role: EchoRole(role[1], clock) for role in roles}


def fail_to_build(roles: Sequence[RoleName]) -> Mapping[RoleName, object]:
    raise MemoryError("no room for the weights")


class Unpicklable:
    """Can be pickled, but not made again elsewhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()

    def __call__(self, roles: Sequence[RoleName]) -> Mapping[RoleName, object]:
        return {}


def _refuse() -> None:
    raise ModuleNotFoundError("No module named 'my_lab'")


def start_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
