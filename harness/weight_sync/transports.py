"""What weights travel over: which calls bring a transport up, in which order both sides act, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from harness.protocols import Span
from harness.runtime.handles import Handle, WorkerDied
from harness.weight_sync.errors import TransferError
from harness.weight_sync.ipc import SharedOffer
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.process_group import Rendezvous
from harness.weight_sync.receiver import WeightOffer

Transport = Literal["collective", "ipc", "host_staged"]
OnDeath = Callable[[], Awaitable[None]]
"""Does what is to be done at once where one end of a transfer dies."""
Spans = list[list[Span]]
"""Of each worker that took part."""


@dataclass
class TransferOutcome:
    """What became of a step of a transfer: the spans of those that did their part, the errors of the others by name."""

    spans: Spans = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)

    def __add__(self, other: TransferOutcome) -> TransferOutcome:
        return TransferOutcome(self.spans + other.spans, self.failed | other.failed)

    def fine(self, handles: Sequence[Handle]) -> list[Handle]:
        """Those of them that did their part."""
        return [handle for handle in handles if handle.name not in self.failed]

    def kept_from(self, receivers: Sequence[Handle]) -> TransferOutcome:
        """The same, where these failures kept receivers from being asked at all: none of them got anything."""
        first = next(iter(self.failed.values()))
        return self + TransferOutcome(
            failed={receiver.name: TransferError(f"nothing was sent: {first}") for receiver in receivers}
        )


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
class _GroupTransport:
    """A process group, met at `host`, whose waits end after timeout_s."""

    host: str
    timeout_s: float
    opened_by: ClassVar[str]
    """The source's method that makes the offer."""
    _rendezvous: Rendezvous | None = field(default=None, init=False, compare=False)

    async def connect(self, source: Handle, receivers: Sequence[Handle], plan: TransferPlan) -> None:
        offer = await source.call(self.opened_by, plan, self.host, len(receivers), self.timeout_s)
        self._rendezvous = offer.rendezvous
        try:
            await _meet(source, receivers, offer)
        except Exception:
            await self.abort()
            raise
        finally:
            if isinstance(offer, SharedOffer):
                offer.withdraw()

    async def abort(self) -> None:
        if self._rendezvous is not None:
            await asyncio.to_thread(self._rendezvous.abort)


@dataclass
class CollectiveTransport(_GroupTransport):
    """A process group between devices."""

    opened_by = "open_collective"

    async def publish(self, trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> TransferOutcome:
        return await send_and_receive(trainers, receivers, version, self.timeout_s, self.abort)


@dataclass
class SharedMemoryTransport(_GroupTransport):
    """Memory that all processes of a device, or of a host, map; the group says when to look."""

    opened_by = "open_shared"

    async def publish(self, trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> TransferOutcome:
        return await send_and_receive(trainers, receivers, version, self.timeout_s, self.abort)


@dataclass
class HostStagedTransport(_GroupTransport):
    """A process group between hosts' memories."""

    opened_by = "open_host_staged"

    async def publish(self, trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> TransferOutcome:
        return await stage_then_swap(trainers, receivers, version, self.timeout_s, self.abort)


def make_transport(transport: Transport, host: str, timeout_s: float) -> WeightTransport:
    """The transport between real processes that a schedule's transport names."""
    match transport:
        case "ipc":
            return SharedMemoryTransport(host, timeout_s)
        case "collective":
            return CollectiveTransport(host, timeout_s)
        case "host_staged":
            return HostStagedTransport(host, timeout_s)


async def ask(
    handles: Sequence[Handle],
    method: str,
    *arguments: Any,
    timeout_s: float | None = None,
    on_death: OnDeath | None = None,
) -> TransferOutcome:
    """The same call on every worker at once; all of them are heard. None that failed keeps the others from ending
    theirs: they are ends of one transfer, which all of them leave on their own, or because `on_death` tells them."""
    asked = (_ask(handle, method, arguments, timeout_s, on_death) for handle in handles)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    outcome = TransferOutcome()
    for handle, answer in zip(handles, answers, strict=True):
        if isinstance(answer, Exception):
            outcome.failed[handle.name] = answer
        elif isinstance(answer, BaseException):
            raise answer
        elif answer is not None:
            outcome.spans.append(answer)
    return outcome


async def _ask(
    handle: Handle, method: str, arguments: tuple[Any, ...], timeout_s: float | None, on_death: OnDeath | None
) -> Any:
    # Twice: who waits for a peer gives up after once, and says so itself.
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


async def write_then_read(
    trainers: Sequence[Handle], receivers: Sequence[Handle], version: int, timeout_s: float | None = None
) -> TransferOutcome:
    """Receivers read what all ranks have written."""
    written = await ask(trainers, "publish", version)
    if written.failed:
        return written.kept_from(receivers)
    return written + await ask(receivers, "load", version, timeout_s=timeout_s)


async def send_and_receive(
    trainers: Sequence[Handle],
    receivers: Sequence[Handle],
    version: int,
    timeout_s: float | None = None,
    on_death: OnDeath | None = None,
) -> TransferOutcome:
    """Both sides have to be in it at once."""
    sent, received = await asyncio.gather(
        ask(trainers, "publish", version, on_death=on_death),
        ask(receivers, "load", version, timeout_s=timeout_s, on_death=on_death),
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
    copied = await ask(trainers, "publish", version)
    if copied.failed:
        return copied.kept_from(receivers)
    staged = await ask(receivers, "stage", version, timeout_s=timeout_s, on_death=on_death)
    there = staged.fine(receivers)
    return copied + staged + await ask(there, "swap", version, timeout_s=timeout_s)


async def join(receivers: Sequence[Handle], offer: WeightOffer) -> None:
    """Every receiver joins under its number, all at once."""
    async with asyncio.TaskGroup() as tasks:
        for number, receiver in enumerate(receivers):
            tasks.create_task(receiver.call("join", offer, number))


async def _meet(source: Handle, receivers: Sequence[Handle], offer: WeightOffer) -> None:
    """Both sides of a process group have to come at once."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(source.call("meet_receivers"))
        tasks.create_task(join(receivers, offer))
