"""Weights to host memory in the background: both sides compute while a full copy travels, by Gloo and in threads.

Every training rank copies the buckets that are dealt to it to its host, and sends them over a group of its own with all
receivers: so each moves its share through its own link. A group carries one transfer at a time: the sender waits for
the one before, a receiver takes them in turn. A wait inside Gloo ends after the rendezvous's timeout, and releases the
GIL to the thread that computes. What travels is the copy itself, bucket by bucket; the memory of a version that was
loaded takes in a later one. Where only what changed travels, a sender keeps a second copy, of what receivers have, and
a receiver makes a version of the one before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engines.host_memory import host_buffers
from harness.config.transports import HostStaged
from harness.protocols import TransferError
from harness.weight_sync.difference import Held, apply
from harness.weight_sync.plan import Bucket, TransferPlan, digests, pack, unpack, verify
from harness.weight_sync.process_group import HOST, BucketInFlight, GroupOffer, Sources, TransferGroup

Copy = list[torch.Tensor]
"""Weights in host memory: uint8, a tensor for each bucket."""


@dataclass(frozen=True)
class HostStagedOffer(GroupOffer):
    """A plan, and where to meet for its broadcasts, which are of host tensors whatever the devices."""

    def receiver(self, number: int, device: torch.device, previous: object = None) -> HostStagedReceiver:
        """A receiver that goes on with what the `previous` one had staged."""
        sources = Sources(self.plan, self.rendezvous.receiver_groups(number, HOST))
        staged = previous._staged if isinstance(previous, HostStagedReceiver) else {}
        return HostStagedReceiver(self.plan, sources, pinned=device.type == "cuda", staged=staged)

    def sender(
        self, store: dist.Store, device: torch.device, previous: object = None, number: int = 0
    ) -> HostStagedSender:
        """The sending end; `store` is the rendezvous's. Returns when all receivers have joined. It can send what the
        `previous` sender had copied."""
        group, owners = self.rendezvous.sender_group(store, HOST, number), self.plan.owners(self.rendezvous.senders)
        if isinstance(previous, HostStagedSender) and previous._owners == owners:
            copy, version = previous._copy, previous._version
        else:
            own = [bucket for bucket, owner in zip(self.plan.buckets, owners, strict=True) if owner == number]
            copy, version = _host_copy(own, device.type == "cuda"), 0
        return HostStagedSender(self.plan, group, owners, number, copy=copy, version=version)


class HostStagedEnds(HostStaged):
    """Both ends of it."""

    offers = HostStagedOffer


class HostStagedSender:
    """Copies its buckets to host memory, then broadcasts the copy in the background. It keeps that one copy, and helps
    to gather the buckets of others."""

    def __init__(
        self,
        plan: TransferPlan,
        group: TransferGroup,
        owners: tuple[int, ...],
        number: int,
        *,
        copy: Copy,
        version: int,
    ) -> None:
        self.plan, self.number, self._group, self._owners = plan, number, group, owners
        self._copy, self._version = copy, version
        self._sending: asyncio.Task[None] | None = None
        self._held = Held()

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Returns when the copy is complete. Waits for the transfer before it, and raises its error."""
        await self.ready()
        own = iter(self._copy)
        for bucket, owner in zip(self.plan.buckets, self._owners, strict=True):
            pack(bucket, parameters, next(own) if owner == self.number else None, owner)
        if any(data.is_pinned() for data in self._copy):
            torch.cuda.synchronize()  # into pinned memory it is copied in the background
        self._version = version
        await self.resend(version)

    async def ready(self) -> None:
        await self.wait_arrived(self._version)

    async def resend(self, version: int) -> None:
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
        own = (bucket for bucket, owner in zip(self.plan.buckets, self._owners, strict=True) if owner == self.number)
        with self._group.guard(self._version):
            for bucket, data in zip(own, self._copy, strict=True):
                outgoing = [data, digests(bucket, data)] if self.plan.checked else [data]
                if self.plan.delta:
                    outgoing = self._held.message(bucket, *outgoing)
                BucketInFlight.start(self._group, outgoing).wait()


class HostStagedReceiver:
    """Keeps the newest complete version and the one that arrives, no third: staging one forgets all but the newest."""

    def __init__(self, plan: TransferPlan, sources: Sources, *, pinned: bool, staged: dict[int, Copy]) -> None:
        self.plan, self._group, self._pinned = plan, sources, pinned
        self._arriving = asyncio.Lock()
        self._staged = dict(staged)
        self._reading: set[int] = set()
        self._free: list[Copy] = []
        self._last: Copy | None = None  # that arrived over these groups; free or not, nothing else is in it yet

    async def stage(self, version: int) -> None:
        """Raises TransferError, naming the version, where it did not arrive whole; then it is not kept."""
        async with self._arriving:
            self._forget(max(self._staged, default=0) - 1)
            copy = self._free.pop() if self._free else _host_copy(self.plan.buckets, self._pinned)
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
            arriving = self._arriving_buckets(copy)
            for bucket, data, last, (body, *expected) in zip(
                self.plan.buckets, copy, self._last or copy, arriving, strict=True
            ):
                if self.plan.delta:
                    if last is not data:
                        data.copy_(last)
                    apply(body, data)
                try:
                    for taken in expected:
                        verify(bucket, data, taken, version)
                except TransferError as error:
                    damage = damage or error
        self._last = copy
        if damage is not None:
            raise damage

    def _arriving_buckets(self, copy: Copy) -> Iterator[list[torch.Tensor]]:
        """Bucket after bucket and, where the plan is checked, its digests. As many are under way as there are senders,
        so that all of them send."""
        under_way: deque[BucketInFlight] = deque()
        try:
            for number, (bucket, data) in enumerate(zip(self.plan.buckets, copy, strict=True)):
                if len(under_way) > self._group.senders:
                    yield under_way.popleft().wait()
                if self.plan.delta:
                    under_way.append(self._group.expect_message(number, bucket, torch.empty_like(data)))
                    continue
                into = [data, torch.empty(len(bucket.tensors), dtype=torch.int64)] if self.plan.checked else [data]
                under_way.append(self._group.expect(number, into))
            while under_way:
                yield under_way.popleft().wait()
        finally:
            under_way.clear()  # a group that is in use does not close, and an error may keep this frame

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


def _host_copy(buckets: Sequence[Bucket], pinned: bool) -> Copy:
    """Host memory for the buckets, pinned where a GPU reads and writes it: that is fastest."""
    return host_buffers([bucket.bytes for bucket in buckets], pinned=pinned)
