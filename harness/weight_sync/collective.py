"""Weights by broadcast: NCCL between GPUs, Gloo between CPUs. Training rank 0 is the source, engines receive.

Two buckets are under way on each side: while one travels, the sender fills the next, and the receiver hands out the one
before. A large tensor that is not sharded is sent from where it lies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from harness.weight_sync.plan import Bucket, TransferPlan, digests, outgoing, pack, pieces
from harness.weight_sync.process_group import BucketEnd, BucketReceiver, BucketSender, Rendezvous, TransferGroup, Work


class CollectiveOffer(msgspec.Struct, frozen=True, tag=True):
    """A plan, and where to meet for its broadcasts."""

    plan: TransferPlan
    rendezvous: Rendezvous

    def receiver(self, number: int, device: torch.device, previous: object = None) -> CollectiveReceiver:
        return CollectiveReceiver(self.plan, self.rendezvous.receiver_group(number, device))

    def sender(self, store: dist.Store, device: torch.device, previous: object = None) -> CollectiveSender:
        """The other end; `store` comes from `open_rendezvous`. Returns when all receivers have joined."""
        return CollectiveSender(self.plan, self.rendezvous.sender_group(store, device))


class _CollectiveEnd(BucketEnd):
    """Two buffers that it keeps, and the buckets that travel."""

    def __init__(self, plan: TransferPlan, group: TransferGroup) -> None:
        super().__init__(plan, group)
        self._buffers = [torch.empty(plan.largest, dtype=torch.uint8, device=group.device) for _ in range(2)]
        self._in_flight: deque[BucketInFlight] = deque()

    def _finish(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait()

    def _release(self) -> None:
        self._in_flight.clear()


class CollectiveSender(_CollectiveEnd, BucketSender):
    """Broadcasts bucket after bucket, from two buffers in turn."""

    def _wait_for_buffer(self, number: int) -> None:
        if len(self._in_flight) == 2:
            self._in_flight.popleft().wait()

    def _fill(self, number: int, bucket: Bucket, parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        buffer = self._buffers[number % 2]
        if not self.plan.checked:
            return outgoing(bucket, parameters, buffer)
        pack(bucket, parameters, buffer)  # the digest is taken of what is sent
        return [*pieces(bucket, buffer), digests(bucket, buffer)]

    def _hand_over(self, filled: list[torch.Tensor]) -> None:
        self._in_flight.append(BucketInFlight.start(self._group, filled))


class CollectiveReceiver(_CollectiveEnd, BucketReceiver):
    """Receives bucket after bucket, into two buffers in turn."""

    def _next(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        while len(self._in_flight) < min(2, len(self.plan.buckets) - number):
            self._in_flight.append(self._expect(number + len(self._in_flight)))
        tensors = self._in_flight.popleft().wait()
        return self._buffers[number % 2], tensors[-1] if self.plan.checked else None

    def _expect(self, number: int) -> BucketInFlight:
        bucket = self.plan.buckets[number]
        into = pieces(bucket, self._buffers[number % 2])
        if self.plan.checked:
            into.append(torch.empty(len(bucket.tensors), dtype=torch.int64, device=self._group.device))
        return BucketInFlight.start(self._group, into)


@dataclass
class BucketInFlight:
    """A bucket that travels, in pieces. Holds the tensors that it is sent from, or received into."""

    group: TransferGroup
    tensors: list[torch.Tensor]
    works: list[Work]

    @classmethod
    def start(cls, group: TransferGroup, tensors: list[torch.Tensor]) -> BucketInFlight:
        return cls(group, tensors, [group.broadcast(tensor) for tensor in tensors if tensor.numel()])

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            self.group.wait(work)
        self.group.synchronise()
        return self.tensors
