"""Workers of one role as the driver asks them, and who hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from harness.metrics.ledger import DropReason
from harness.protocols import Span
from harness.runtime.runtime import Handle, call_all
from harness.workers.actor import TrainReport

EngineEvent = Literal["lost", "leaves", "left", "joins", "works"]


class Observer(Protocol):
    """Hears what happens in a job, as it happens. Whatever it hears is progress."""

    def admitted(self, rows: Sequence[int], prompt_tokens: int, at: float) -> None: ...

    def dropped(self, rows: Sequence[int], reason: DropReason) -> None: ...

    def doing(self, role: str, what: str) -> None: ...

    def engine(self, name: str, what: EngineEvent, why: str = "") -> None:
        """A rollout engine is lost, leaves or joins."""

    def spans(self, spans: Iterable[Span]) -> None: ...

    def trained(self, iteration: int, reports: Sequence[TrainReport]) -> None: ...

    def published(self, version: int, queue: Mapping[str, float]) -> None:
        """queue: its metrics, as `queue_metrics` names them."""


class Pool:
    """Workers of one role. What they did is heard when a call ends; of a long one also meanwhile, whenever asked."""

    def __init__(self, name: str, workers: Sequence[Handle], observer: Observer) -> None:
        self.name, self.observer = name, observer
        self._workers = list(workers)
        self._asked = asyncio.Event()

    @property
    def workers(self) -> list[Handle]:
        return self._workers

    def ask_spans(self) -> None:
        """Have a long call that is under way hand in its spans so far. Nobody waits for them: a worker in the middle of
        a computation answers after it."""
        self._asked.set()

    async def _call(self, method: str, *arguments: Any) -> None:
        self._hear(await call_all(self.workers, method, *arguments))

    async def _long(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it; meanwhile, whenever somebody asks for spans, have them handed in."""
        self._asked.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(work)
            call.add_done_callback(lambda _: self._asked.set())
            while not call.done():
                await self._asked.wait()
                self._asked.clear()
                if not call.done():
                    await self._call("take_spans")

    def _hear(self, spans_by_worker: Iterable[Iterable[Span]]) -> None:
        for spans in spans_by_worker:
            self.observer.spans(spans)
