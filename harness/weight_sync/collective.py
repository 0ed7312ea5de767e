"""Weights by broadcast: NCCL between GPUs, Gloo between CPUs. Training rank 0 is the source, engines receive.

The process group is built directly on a store, beside whatever default group its members have, so that an engine needs
nothing of the trainer's and the trainer nothing of the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from harness.weight_sync.plan import TransferPlan, pack, unpack

SOURCE = 0


@dataclass(frozen=True)
class Meeting:
    """Where a process group comes together: a store at host:port, `size` members, waits that end after timeout_s."""

    host: str
    port: int
    size: int
    timeout_s: float

    def host_group(self, store: dist.Store, device: torch.device) -> dist.ProcessGroup:
        """The group as member 0, which holds the store. Returns when all members have joined."""
        return _group(store, SOURCE, self.size, device, self.timeout_s)

    def guest_group(self, number: int, device: torch.device) -> dist.ProcessGroup:
        """The group as receiver `number` (from 0)."""
        store = dist.TCPStore(self.host, self.port, self.size, False, _seconds(self.timeout_s), wait_for_workers=False)
        return _group(store, number + 1, self.size, device, self.timeout_s)


def open_meeting(host: str, receivers: int, timeout_s: float) -> tuple[Meeting, dist.Store]:
    """A store on a free port of `host` and the way to it. The store lives as long as it is held."""
    store = dist.TCPStore(host, 0, receivers + 1, True, _seconds(timeout_s), wait_for_workers=False)
    return Meeting(host, store.port, receivers + 1, timeout_s), store


@dataclass(frozen=True)
class CollectiveOffer:
    """A plan, and where to meet for its broadcasts."""

    plan: TransferPlan
    meeting: Meeting

    def receiver(self, number: int, device: torch.device) -> CollectiveReceiver:
        return CollectiveReceiver(self.plan, self.meeting.guest_group(number, device), device)

    def sender(self, store: dist.Store, device: torch.device) -> CollectiveSender:
        """The other end; `store` comes from `open_meeting`. Returns when all receivers have joined."""
        return CollectiveSender(self.plan, self.meeting.host_group(store, device), device)


class CollectiveSender:
    """Broadcasts bucket after bucket; holds one bucket beyond the caller's shards."""

    def __init__(self, plan: TransferPlan, group: dist.ProcessGroup, device: torch.device) -> None:
        self.plan, self._group, self._device = plan, group, device

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        buffer = torch.empty(self.plan.largest, dtype=torch.uint8, device=self._device)
        for bucket in self.plan.buckets:
            pack(bucket, parameters, buffer)
            broadcast(self._group, buffer[: bucket.bytes])


class CollectiveReceiver:
    """Receives bucket after bucket into one buffer."""

    def __init__(self, plan: TransferPlan, group: dist.ProcessGroup, device: torch.device) -> None:
        self.plan, self._group, self._device = plan, group, device

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(self.plan.largest, dtype=torch.uint8, device=self._device)
        for bucket in self.plan.buckets:
            broadcast(self._group, buffer[: bucket.bytes])
            yield from unpack(bucket, buffer)


def _group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> dist.ProcessGroup:
    prefixed = dist.PrefixStore("weight_sync", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _seconds(timeout_s)
        return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(prefixed, rank, size, options))
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(prefixed, rank, size, _seconds(timeout_s)))


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
    """From member 0 to all others; returns when `buffer` (uint8, on the group's device) was read or filled."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = SOURCE, 0
    group.broadcast([buffer], options).wait()
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
