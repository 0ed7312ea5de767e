"""Weights by broadcast: NCCL between GPUs, Gloo between CPUs. Training rank 0 is the source, engines receive.

Two buckets are under way on each side: while one travels, the sender fills the next, and the receiver hands out the one
before. A tensor that lies ready is sent from where it lies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.weight_sync.digests import digests, verify
from harness.weight_sync.errors import TransferError
from harness.weight_sync.plan import Bucket, TransferPlan, outgoing, pack, pieces, unpack
from harness.weight_sync.process_group import Rendezvous, TransferGroup, Work


@dataclass(frozen=True)
class CollectiveOffer:
    """A plan, and where to meet for its broadcasts."""

    plan: TransferPlan
    rendezvous: Rendezvous

    def receiver(self, number: int, device: torch.device, before: object = None) -> CollectiveReceiver:
        return CollectiveReceiver(self.plan, self.rendezvous.receiver_group(number, device))

    def sender(self, store: dist.Store, device: torch.device, before: object = None) -> CollectiveSender:
        """The other end; `store` comes from `open_rendezvous`. Returns when all receivers have joined."""
        return CollectiveSender(self.plan, self.rendezvous.sender_group(store, device))


class CollectiveSender:
    """Broadcasts bucket after bucket, from two buffers that it keeps."""

    def __init__(self, plan: TransferPlan, group: TransferGroup) -> None:
        self.plan, self._group = plan, group
        self._buffers = _two_buffers(plan, group.device)

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Gathering goes to its end also where the group broke: the other ranks are in it, and are not to hang."""
        failure: TransferError | None = None
        sending: deque[BucketInFlight] = deque()
        try:
            for number, bucket in enumerate(self.plan.buckets):
                if failure is None and len(sending) == 2:
                    failure = self._await(sending, version)
                buffer = self._buffers[number % 2]
                if self.plan.checked:  # what is sent is what the digest was taken of
                    pack(bucket, parameters, buffer)
                    ready = pieces(bucket, buffer)
                else:
                    ready = outgoing(bucket, parameters, buffer)
                if failure is None:
                    failure = self._start(sending, bucket, buffer, ready, version)
            while failure is None and sending:
                failure = self._await(sending, version)
        except BaseException:  # the weights could not be gathered: receivers wait for what will never come
            sending.clear()
            self._group.close()
            raise
        if failure is not None:
            raise failure

    def _start(
        self,
        sending: deque[BucketInFlight],
        bucket: Bucket,
        buffer: torch.Tensor,
        ready: list[torch.Tensor],
        version: int,
    ) -> TransferError | None:
        try:
            with self._group.guard(version):
                checks = [digests(bucket, buffer)] if self.plan.checked else []
                sending.append(BucketInFlight.on(self._group, [*ready, *checks]))
        except TransferError as error:
            return error
        return None

    def _await(self, sending: deque[BucketInFlight], version: int) -> TransferError | None:
        try:
            with self._group.guard(version):
                sending.popleft().wait()
        except TransferError as error:
            return error
        return None


class CollectiveReceiver:
    """Receives bucket after bucket, into two buffers that it keeps."""

    def __init__(self, plan: TransferPlan, group: TransferGroup) -> None:
        self.plan, self._group = plan, group
        self._buffers = _two_buffers(plan, group.device)

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What travels is taken to its end also where a tensor is damaged or the reader stops: so this end holds up no
        other. Raises TransferError."""
        damage: TransferError | None = None
        arriving: deque[BucketInFlight] = deque()
        for number, bucket in enumerate(self.plan.buckets):
            with self._group.guard(version):
                while len(arriving) < min(2, len(self.plan.buckets) - number):
                    arriving.append(self._expect(number + len(arriving)))
                tensors = arriving.popleft().wait()
            buffer = self._buffers[number % 2]
            try:
                if self.plan.checked and damage is None:
                    verify(bucket, buffer, tensors[-1], version)
                if damage is None:
                    yield from unpack(bucket, buffer)
            except TransferError as error:
                damage = error
            except GeneratorExit:
                self._take_the_rest(number + 1, arriving, version)
                raise
        if damage is not None:
            raise damage

    def _expect(self, number: int) -> BucketInFlight:
        bucket = self.plan.buckets[number]
        into = pieces(bucket, self._buffers[number % 2])
        if self.plan.checked:
            into.append(torch.empty(len(bucket.tensors), dtype=torch.int64, device=self._group.device))
        return BucketInFlight.on(self._group, into)

    def _take_the_rest(self, number: int, arriving: deque[BucketInFlight], version: int) -> None:
        """`number` is the next bucket. Whoever stopped has a reason that counts more than what happens to the rest."""
        try:
            with self._group.guard(version):
                while arriving:
                    arriving.popleft().wait()
                    if number + 1 < len(self.plan.buckets):
                        number += 1
                        arriving.append(self._expect(number))
        except TransferError:
            self._group.close()


@dataclass
class BucketInFlight:
    """A bucket on its way, in pieces. Holds what it sends, or receives into."""

    group: TransferGroup
    tensors: list[torch.Tensor]
    works: list[Work]

    @classmethod
    def on(cls, group: TransferGroup, tensors: list[torch.Tensor]) -> BucketInFlight:
        return cls(group, tensors, [group.broadcast(tensor) for tensor in tensors if tensor.numel()])

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            self.group.wait(work)
        self.group.synchronise()
        return self.tensors


def _two_buffers(plan: TransferPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (torch.empty(plan.largest, dtype=torch.uint8, device=device) for _ in range(2))
    return first, second
