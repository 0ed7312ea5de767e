"""Weights to host memory in the background: both sides compute while a full copy travels, by Gloo and in threads.

A process group carries one transfer at a time: the sender waits for the one before, a receiver takes them in turn. A
wait inside Gloo ends after the rendezvous's timeout, and releases the GIL to the thread that computes. What travels is
the copy itself, bucket by bucket; the memory of a version that was loaded takes in a later one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping

import msgspec
import torch
import torch.distributed as dist

from harness.weight_sync.plan import TransferError, TransferPlan, digests, pack, unpack, verify
from harness.weight_sync.process_group import HOST, Rendezvous, TransferGroup

Copy = list[torch.Tensor]
"""All weights in host memory: uint8, a tensor for each bucket."""


class HostStagedOffer(msgspec.Struct, frozen=True, tag=True):
    """A plan, and where to meet for its broadcasts, which are of host tensors whatever the devices."""

    plan: TransferPlan
    rendezvous: Rendezvous

    def receiver(self, number: int, device: torch.device, previous: object = None) -> HostStagedReceiver:
        """One that goes on with what the `previous` receiver had staged."""
        group = self.rendezvous.receiver_group(number, HOST)
        staged = previous._staged if isinstance(previous, HostStagedReceiver) else {}
        return HostStagedReceiver(self.plan, group, pinned=device.type == "cuda", staged=staged)

    def sender(self, store: dist.Store, device: torch.device, previous: object = None) -> HostStagedSender:
        """The other end; `store` comes from `open_rendezvous`. Returns when all receivers have joined. It can send what
        the `previous` sender had copied."""
        group = self.rendezvous.sender_group(store, HOST)
        if isinstance(previous, HostStagedSender):
            return HostStagedSender(self.plan, group, copy=previous._copy, version=previous._version)
        return HostStagedSender(self.plan, group, copy=_host_copy(self.plan, device.type == "cuda"), version=0)


class HostStagedSender:
    """Copies the weights to host memory, then broadcasts the copy in the background. It keeps that one copy."""

    def __init__(self, plan: TransferPlan, group: TransferGroup, *, copy: Copy, version: int) -> None:
        self.plan, self._group = plan, group
        self._copy, self._version = copy, version
        self._sending: asyncio.Task[None] | None = None

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Returns when the copy is complete. Waits for the transfer before it, and raises its error."""
        await self.ready()
        for bucket, buffer in zip(self.plan.buckets, self._copy, strict=True):
            pack(bucket, parameters, buffer)
        if self._copy[0].is_pinned():
            torch.cuda.synchronize()  # into pinned memory it is copied in the background
        self._version = version
        await self.resend(version)

    async def ready(self) -> None:
        await self.wait_arrived(self._version)

    async def resend(self, version: int) -> None:
        """Send the copy of `version`, again if need be. Returns at once."""
        require_sent(version, self._version)
        self._sending = asyncio.create_task(asyncio.to_thread(self._broadcast))

    async def wait_arrived(self, version: int) -> None:
        require_sent(version, self._version)
        if self._sending is None:
            return
        try:
            await asyncio.shield(self._sending)  # a caller that gives up does not stop the thread
        except TransferError as error:
            raise TransferError(f"version {version} did not get to all receivers: {error}") from error

    def _broadcast(self) -> None:
        with self._group.guard(self._version):
            for bucket, data in zip(self.plan.buckets, self._copy, strict=True):
                self._group.wait(self._group.broadcast(data))
                if self.plan.checked:
                    self._group.wait(self._group.broadcast(digests(bucket, data)))


class HostStagedReceiver:
    """Keeps the newest complete version and the one that arrives, no third: staging one forgets all but the newest."""

    def __init__(self, plan: TransferPlan, group: TransferGroup, *, pinned: bool, staged: dict[int, Copy]) -> None:
        self.plan, self._group, self._pinned = plan, group, pinned
        self._arriving = asyncio.Lock()
        self._staged = dict(staged)
        self._reading: set[int] = set()
        self._free: list[Copy] = []

    async def stage(self, version: int) -> None:
        """Raises TransferError, naming the version, where it did not arrive whole; then it is not kept."""
        async with self._arriving:
            self._forget(max(self._staged, default=0) - 1)
            copy = self._free.pop() if self._free else _host_copy(self.plan, self._pinned)
            try:
                await asyncio.to_thread(self._receive, version, copy)
            except TransferError as error:
                self._free.append(copy)
                raise TransferError(f"version {version} did not arrive: {error}") from error
            self._staged[version] = copy

    def staged(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        require_staged(version, self._staged)  # now, not at the first tensor: a load would have begun
        return self._unpack(version, self._staged[version])

    def _unpack(self, version: int, copy: Copy) -> Iterator[tuple[str, torch.Tensor]]:
        self._reading.add(version)
        try:
            for bucket, data in zip(self.plan.buckets, copy, strict=True):
                yield from unpack(bucket, data)
            if self._pinned:
                torch.cuda.synchronize()  # from pinned memory it may still be read
        finally:
            self._reading.discard(version)
        self._forget(version)

    def _receive(self, version: int, copy: Copy) -> None:
        """Receives to the end even where a tensor is damaged, so that no other end is held up."""
        damage: TransferError | None = None
        with self._group.guard(version):
            for bucket, data in zip(self.plan.buckets, copy, strict=True):
                self._group.wait(self._group.broadcast(data))
                if self.plan.checked:
                    expected = torch.empty(len(bucket.tensors), dtype=torch.int64)
                    self._group.wait(self._group.broadcast(expected))
                    try:
                        verify(bucket, data, expected, version)
                    except TransferError as error:
                        damage = damage or error
        if damage is not None:
            raise damage

    def _forget(self, newest: int) -> None:
        """Drop `newest` and all older versions; their memory is free for later ones, unless it is being read."""
        for version in [version for version in self._staged if version <= newest]:
            copy = self._staged.pop(version)
            if version not in self._reading:
                self._free.append(copy)


def require_sent(version: int, sent: int) -> None:
    """Raises ValueError unless `version` is the last one that was sent."""
    if version != sent:
        raise ValueError(f"version {version} is not under way; the last one sent is {sent}")


def require_staged(version: int, staged: Collection[int]) -> None:
    """Raises ValueError, naming the versions that are there, unless `version` is among them."""
    if version not in staged:
        there = ", ".join(map(str, sorted(staged))) or "none"
        raise ValueError(f"version {version} is not in host memory; there: {there}")


def _host_copy(plan: TransferPlan, pinned: bool) -> Copy:
    """Pinned memory is what a GPU reads and writes fastest."""
    return [torch.empty(bucket.bytes, dtype=torch.uint8, pin_memory=pinned) for bucket in plan.buckets]
