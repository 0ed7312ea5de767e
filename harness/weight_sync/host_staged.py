"""Weights to host memory in the background: both sides compute while a full copy travels, by Gloo and in threads.

A process group carries one transfer at a time: the sender waits for the one before, a receiver takes them in turn. A
wait inside Gloo ends after the meeting's timeout, and leaves the interpreter to the thread that computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.weight_sync.collective import Meeting, broadcast
from harness.weight_sync.plan import TransferPlan, pack, unpack

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class HostStagedOffer:
    """A plan, and where to meet for its broadcasts, which are of host tensors whatever the devices."""

    plan: TransferPlan
    meeting: Meeting

    def receiver(self, number: int, device: torch.device) -> HostStagedReceiver:
        return HostStagedReceiver(self.plan, self.meeting.guest_group(number, _HOST), pinned=device.type == "cuda")

    def sender(self, store: dist.Store, device: torch.device) -> HostStagedSender:
        """The other end; `store` comes from `open_meeting`. Returns when all receivers have joined."""
        return HostStagedSender(self.plan, self.meeting.host_group(store, _HOST), pinned=device.type == "cuda")


class HostStagedSender:
    """Copies the weights to host memory, then broadcasts the copy in the background. Holds that one copy for good."""

    def __init__(self, plan: TransferPlan, group: dist.ProcessGroup, *, pinned: bool) -> None:
        self.plan, self._group = plan, group
        self._copy = _host_buffers(plan, pinned)
        self._version = 0
        self._sending: asyncio.Task[None] | None = None

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Returns when the copy is complete. Waits for the transfer before it, and raises its error."""
        await self.arrived(self._version)
        for bucket, buffer in zip(self.plan.buckets, self._copy, strict=True):
            pack(bucket, parameters, buffer)
        self._version = version
        self._sending = asyncio.create_task(asyncio.to_thread(_broadcast_all, self._group, self._copy))

    async def arrived(self, version: int) -> None:
        if version != self._version:
            raise ValueError(f"version {version} is not under way; the last one sent is {self._version}")
        if self._sending is None:
            return
        try:
            await asyncio.shield(self._sending)  # a caller that gives up does not stop the thread
        except RuntimeError as error:
            raise RuntimeError(f"version {version} did not get to all receivers: {error}") from error


class HostStagedReceiver:
    """Keeps the newest complete version and the one that arrives, no third: staging one forgets all but the newest."""

    def __init__(self, plan: TransferPlan, group: dist.ProcessGroup, *, pinned: bool) -> None:
        self.plan, self._group, self._pinned = plan, group, pinned
        self._arriving = asyncio.Lock()
        self._staged: dict[int, list[torch.Tensor]] = {}

    async def stage(self, version: int) -> None:
        """Raises RuntimeError, naming the version, where it did not arrive whole; then it is not kept."""
        async with self._arriving:
            self._forget(max(self._staged, default=0) - 1)
            try:
                self._staged[version] = await asyncio.to_thread(self._receive)
            except RuntimeError as error:
                raise RuntimeError(f"version {version} did not arrive: {error}") from error

    def staged(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        if version not in self._staged:  # now, not at the first tensor: a load that began would leave an engine unfit
            there = ", ".join(map(str, sorted(self._staged))) or "none"
            raise ValueError(f"version {version} is not in host memory; there: {there}")
        return self._unpack(version, self._staged[version])

    def _unpack(self, version: int, buffers: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket, buffer in zip(self.plan.buckets, buffers, strict=True):
            yield from unpack(bucket, buffer)
        self._forget(version)

    def _receive(self) -> list[torch.Tensor]:
        buffers = _host_buffers(self.plan, self._pinned)
        _broadcast_all(self._group, buffers)
        return buffers

    def _forget(self, newest: int) -> None:
        """Drop `newest` and all older versions."""
        self._staged = {version: buffers for version, buffers in self._staged.items() if version > newest}


def _host_buffers(plan: TransferPlan, pinned: bool) -> list[torch.Tensor]:
    """A buffer for each bucket; pinned memory is what a GPU reads and writes fastest."""
    return [torch.empty(bucket.bytes, dtype=torch.uint8, pin_memory=pinned) for bucket in plan.buckets]


def _broadcast_all(group: dist.ProcessGroup, buffers: list[torch.Tensor]) -> None:
    for buffer in buffers:
        broadcast(group, buffer)
