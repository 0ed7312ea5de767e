"""What weights travel over: which calls bring a wire up, and in which order both sides act."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from harness.protocols import Span
from harness.runtime.handles import Handle, call_all
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.receiver import WeightOffer

Transport = Literal["collective", "ipc", "host_staged"]
Spans = list[list[Span]]
"""Of each worker that took part."""


class Wire(Protocol):
    async def connect(self, source: Handle, receivers: Sequence[Handle], plan: TransferPlan) -> None:
        """Give `source` (training rank 0) a sender, and each receiver its end; returns when all have joined."""

    async def publish(self, trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> Spans:
        """Bring the trained weights to every receiver, and load them there."""


@dataclass(frozen=True)
class SharedMemoryWire:
    """A buffer that all processes of a host map."""

    async def connect(self, source: Handle, receivers: Sequence[Handle], plan: TransferPlan) -> None:
        offer = await source.call("open_shared", plan)
        try:
            await join(receivers, offer)
        finally:
            offer.path.unlink()  # all have it mapped, or the run ends: either way nothing may stay behind

    async def publish(self, trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> Spans:
        return await write_then_read(trainers, receivers, version)


@dataclass(frozen=True)
class _GroupWire:
    """A process group, met at `host`, whose waits end after timeout_s."""

    host: str
    timeout_s: float
    opened_by: ClassVar[str]
    """The source's method that makes the offer."""

    async def connect(self, source: Handle, receivers: Sequence[Handle], plan: TransferPlan) -> None:
        offer = await source.call(self.opened_by, plan, self.host, len(receivers), self.timeout_s)
        await _meet(source, receivers, offer)


@dataclass(frozen=True)
class CollectiveWire(_GroupWire):
    """A process group between devices."""

    opened_by = "open_collective"

    async def publish(self, trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> Spans:
        return await send_and_receive(trainers, receivers, version)


@dataclass(frozen=True)
class HostStagedWire(_GroupWire):
    """A process group between hosts' memories."""

    opened_by = "open_host_staged"

    async def publish(self, trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> Spans:
        return await stage_then_swap(trainers, receivers, version)


def wire_of(transport: Transport, host: str, timeout_s: float) -> Wire:
    """The wire between real processes that a schedule's transport names."""
    match transport:
        case "ipc":
            return SharedMemoryWire()
        case "collective":
            return CollectiveWire(host, timeout_s)
        case "host_staged":
            return HostStagedWire(host, timeout_s)


async def write_then_read(trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> Spans:
    """Receivers read what all ranks have written."""
    return await call_all(trainers, "publish", version) + await call_all(receivers, "load", version)


async def send_and_receive(trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> Spans:
    """Both sides of a collective have to be in it at once."""
    async with asyncio.TaskGroup() as tasks:
        sent = tasks.create_task(call_all(trainers, "publish", version))
        received = tasks.create_task(call_all(receivers, "load", version))
    return sent.result() + received.result()


async def stage_then_swap(trainers: Sequence[Handle], receivers: Sequence[Handle], version: int) -> Spans:
    """All steps of a staged transfer, one after the other."""
    return [
        *await call_all(trainers, "publish", version),
        *await call_all(receivers, "stage", version),
        *await call_all(receivers, "swap", version),
    ]


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
