"""Weights by broadcast: NCCL between GPUs, Gloo between CPUs. Every training rank sends the buckets that are dealt to
it, over a group of its own with all receivers.

Two buckets are under way at every end: while one travels, a sender fills its next one, and the receiver hands out the
one before. All receivers expect buckets in the same order, no more than two at once, as NCCL asks of those that are
members of several communicators. A large tensor that is not sharded is sent from where it lies.

Where only what changed travels, both ends keep a copy of all buckets that they send or receive, on their device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.config.transports import Collective
from harness.weight_sync.difference import Held
from harness.weight_sync.plan import Bucket, TransferPlan, digests, outgoing, pack, pieces
from harness.weight_sync.process_group import (
    BucketEnd,
    BucketInFlight,
    BucketReceiver,
    BucketSender,
    GroupOffer,
    Sources,
    TransferGroup,
)


@dataclass(frozen=True)
class CollectiveOffer(GroupOffer):
    """A plan, and where to meet for its broadcasts."""

    def receiver(self, number: int, device: torch.device, previous: object = None) -> CollectiveReceiver:
        return CollectiveReceiver(self.plan, Sources(self.plan, self.rendezvous.receiver_groups(number, device)))

    def sender(
        self, store: dist.Store, device: torch.device, previous: object = None, number: int = 0
    ) -> CollectiveSender:
        group = self.rendezvous.sender_group(store, device, number)
        return CollectiveSender(self.plan, group, self.rendezvous.senders, number)


class CollectiveEnds(Collective):
    """Both ends of it."""

    offers = CollectiveOffer


class _CollectiveEnd(BucketEnd):
    """Two buffers that it keeps, and the buckets that travel."""

    _buffers: list[torch.Tensor]
    _in_flight: deque[BucketInFlight]
    _held: Held

    def _make_buffers(self) -> None:
        device = self._group.device
        self._buffers = [torch.empty(self.plan.largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self._in_flight = deque()
        self._held = Held()

    def _finish(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait()

    def _release(self) -> None:
        self._in_flight.clear()


class CollectiveSender(_CollectiveEnd, BucketSender):
    """Broadcasts bucket after bucket, from two buffers in turn."""

    _group: TransferGroup

    def __init__(self, plan: TransferPlan, group: TransferGroup, senders: int = 1, number: int = 0) -> None:
        super().__init__(plan, group, senders, number)
        self._make_buffers()

    def _wait_for_buffer(self) -> None:
        if len(self._in_flight) == 2:
            self._in_flight.popleft().wait()

    def _fill(self, turn: int, bucket: Bucket, parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        buffer = self._buffers[turn]
        if not self.plan.checked:
            return outgoing(bucket, parameters, buffer, self.number)
        pack(bucket, parameters, buffer, self.number)  # the digest is taken of what is sent
        taken = digests(bucket, buffer)
        return self._held.message(bucket, buffer, taken) if self.plan.delta else [*pieces(bucket, buffer), taken]

    def _hand_over(self, filled: list[torch.Tensor]) -> None:
        self._in_flight.append(BucketInFlight.start(self._group, filled))


class CollectiveReceiver(_CollectiveEnd, BucketReceiver):
    """Receives bucket after bucket, into two buffers in turn."""

    _group: Sources

    def __init__(self, plan: TransferPlan, sources: Sources) -> None:
        super().__init__(plan, sources)
        self._make_buffers()

    def _next(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        while len(self._in_flight) < min(2, len(self.plan.buckets) - number):
            self._in_flight.append(self._expect(number + len(self._in_flight)))
        tensors = self._in_flight.popleft().wait()
        if self.plan.delta:
            return self._held.taken(self.plan.buckets[number], tensors[0]), tensors[1]
        return self._buffers[number % 2], tensors[-1] if self.plan.checked else None

    def _expect(self, number: int) -> BucketInFlight:
        bucket = self.plan.buckets[number]
        if self.plan.delta:
            return self._group.expect_message(number, bucket, self._buffers[number % 2])
        into = pieces(bucket, self._buffers[number % 2])
        if self.plan.checked:
            into.append(torch.empty(len(bucket.tensors), dtype=torch.int64, device=self._group.device))
        return self._group.expect(number, into)
