"""What weights travel by: which calls connect a transport, in which order both sides act, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.protocols import Span
from harness.runtime.runtime import Handle, WorkerDied
from harness.weight_sync.endpoints import WeightOffer
from harness.weight_sync.ipc import SharedOffer
from harness.weight_sync.plan import TransferError, TransferPlan
from harness.weight_sync.process_group import Rendezvous
from schedules.base import Transport

OnDeath = Callable[[], Awaitable[None]]
"""What is done at once where one end of a transfer dies."""


@dataclass
class TransferOutcome:
    """What came of a step of a transfer: the spans of each worker that succeeded, the errors of the others by name."""

    spans: list[list[Span]] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)

    def __add__(self, other: TransferOutcome) -> TransferOutcome:
        return TransferOutcome(self.spans + other.spans, self.failed | other.failed)

    def succeeded(self, handles: Sequence[Handle]) -> list[Handle]:
        """Those of them that did not fail."""
        return [handle for handle in handles if handle.name not in self.failed]

    def skipping(self, receivers: Sequence[Handle]) -> TransferOutcome:
        """The same, where these failures kept receivers from being called at all: none of them got anything."""
        first = next(iter(self.failed.values()))
        errors = {receiver.name: TransferError(f"nothing was sent: {first}") for receiver in receivers}
        return self + TransferOutcome(failed=dict(errors))


class WeightTransport(Protocol):
    @property
    def timeout_s(self) -> float | None:
        """The longest wait of one end for the others; None where nothing can go missing."""

    async def connect(self, source: Handle, receivers: Sequence[Handle], plan: TransferPlan) -> None:
        """Give `source` (training rank 0) a sender, and each receiver its end; returns when all have joined. Again,
        where the receivers are others than before, or one side failed."""

    async def publish(self, trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> TransferOutcome:
        """Bring the trained weights to every receiver, and load them there."""

    async def abort(self) -> None:
        """One end died: the others are not to wait for it. They have to be connected again."""


@dataclass
class GroupTransport:
    """Between real processes, which meet as a process group at `host`; their waits end after timeout_s."""

    name: Transport
    host: str
    timeout_s: float
    _rendezvous: Rendezvous | None = field(default=None, init=False, compare=False)

    async def connect(self, source: Handle, receivers: Sequence[Handle], plan: TransferPlan) -> None:
        offer = await source.call("open", self.name, plan, self.host, len(receivers), self.timeout_s)
        self._rendezvous = offer.rendezvous
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(source.call("meet_receivers"))
                tasks.create_task(join_all(receivers, offer))
        except Exception:
            await self.abort()
            raise
        finally:
            if isinstance(offer, SharedOffer):
                offer.withdraw()

    async def publish(self, trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> TransferOutcome:
        publish = stage_then_swap if self.name == "host_staged" else send_and_receive
        return await publish(trainers, receivers, version, self.timeout_s, self.abort)

    async def abort(self) -> None:
        if self._rendezvous is not None:
            await asyncio.to_thread(self._rendezvous.abort)


async def join_all(receivers: Sequence[Handle], offer: WeightOffer) -> None:
    """Every receiver joins under its number, all at once."""
    async with asyncio.TaskGroup() as tasks:
        for number, receiver in enumerate(receivers):
            tasks.create_task(receiver.call("join", offer, number))


async def call_each(
    handles: Sequence[Handle],
    method: str,
    *arguments: Any,
    timeout_s: float | None = None,
    on_death: OnDeath | None = None,
) -> TransferOutcome:
    """The same call on every worker at once; all of them are awaited. One that fails does not cancel the others: they
    are ends of one transfer, which each leaves on its own, or because `on_death` aborts it."""
    calls = (_call(handle, method, arguments, timeout_s, on_death) for handle in handles)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    outcome = TransferOutcome()
    for handle, answer in zip(handles, answers, strict=True):
        if isinstance(answer, Exception):
            outcome.failed[handle.name] = answer
        elif isinstance(answer, BaseException):
            raise answer
        elif answer is not None:
            outcome.spans.append(answer)
    return outcome


async def _call(
    handle: Handle, method: str, arguments: tuple[Any, ...], timeout_s: float | None, on_death: OnDeath | None
) -> Any:
    # Twice: a worker that waits for a peer gives up after once, and says so itself.
    limit = None if timeout_s is None else 2 * timeout_s
    try:
        async with asyncio.timeout(limit):
            return await handle.call(method, *arguments)
    except WorkerDied:
        if on_death is not None:
            await on_death()
        raise
    except TimeoutError as error:
        raise TimeoutError(f"{handle.name} did not answer {method} within {limit} s") from error


async def send_and_receive(
    trainers: Sequence[Handle],
    receivers: Sequence[Handle],
    version: int,
    timeout_s: float | None = None,
    on_death: OnDeath | None = None,
) -> TransferOutcome:
    """Both sides have to take part at once."""
    sent, received = await asyncio.gather(
        call_each(trainers, "publish", version, on_death=on_death),
        call_each(receivers, "load", version, timeout_s=timeout_s, on_death=on_death),
    )
    return sent + received


async def stage_then_swap(
    trainers: Sequence[Handle],
    receivers: Sequence[Handle],
    version: int,
    timeout_s: float | None = None,
    on_death: OnDeath | None = None,
) -> TransferOutcome:
    """All steps of a staged transfer, one after the other."""
    copied = await call_each(trainers, "publish", version)
    if copied.failed:
        return copied.skipping(receivers)
    staged = await call_each(receivers, "stage", version, timeout_s=timeout_s, on_death=on_death)
    return copied + staged + await call_each(staged.succeeded(receivers), "swap", version, timeout_s=timeout_s)


async def write_then_read(trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> TransferOutcome:
    """Receivers read what all ranks have written."""
    written = await call_each(trainers, "publish", version)
    return written.skipping(receivers) if written.failed else written + await call_each(receivers, "load", version)
