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
from harness.weight_sync.link import Link, Meeting, OnItsWay
from harness.weight_sync.plan import Bucket, TransferPlan, outgoing, pack, pieces, unpack


@dataclass(frozen=True)
class CollectiveOffer:
    """A plan, and where to meet for its broadcasts."""

    plan: TransferPlan
    meeting: Meeting

    def receiver(self, number: int, device: torch.device, before: object = None) -> CollectiveReceiver:
        return CollectiveReceiver(self.plan, self.meeting.guest_link(number, device))

    def sender(self, store: dist.Store, device: torch.device, before: object = None) -> CollectiveSender:
        """The other end; `store` comes from `open_meeting`. Returns when all receivers have joined."""
        return CollectiveSender(self.plan, self.meeting.host_link(store, device))


class CollectiveSender:
    """Broadcasts bucket after bucket, from two buffers that it keeps."""

    def __init__(self, plan: TransferPlan, link: Link) -> None:
        self.plan, self._link = plan, link
        self._buffers = _two_buffers(plan, link.device)

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Gathering goes to its end also where the link broke: the other ranks are in it, and are not to hang."""
        failure: TransferError | None = None
        sending: deque[Travelling] = deque()
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
            self._link.close()
            raise
        if failure is not None:
            raise failure

    def _start(
        self,
        sending: deque[Travelling],
        bucket: Bucket,
        buffer: torch.Tensor,
        ready: list[torch.Tensor],
        version: int,
    ) -> TransferError | None:
        try:
            with self._link.guard(version):
                checks = [digests(bucket, buffer)] if self.plan.checked else []
                sending.append(Travelling.on(self._link, [*ready, *checks]))
        except TransferError as error:
            return error
        return None

    def _await(self, sending: deque[Travelling], version: int) -> TransferError | None:
        try:
            with self._link.guard(version):
                sending.popleft().wait()
        except TransferError as error:
            return error
        return None


class CollectiveReceiver:
    """Receives bucket after bucket, into two buffers that it keeps."""

    def __init__(self, plan: TransferPlan, link: Link) -> None:
        self.plan, self._link = plan, link
        self._buffers = _two_buffers(plan, link.device)

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What travels is taken to its end also where a tensor is damaged or the reader stops: so this end holds up no
        other. Raises TransferError."""
        damage: TransferError | None = None
        arriving: deque[Travelling] = deque()
        for number, bucket in enumerate(self.plan.buckets):
            with self._link.guard(version):
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

    def _expect(self, number: int) -> Travelling:
        bucket = self.plan.buckets[number]
        into = pieces(bucket, self._buffers[number % 2])
        if self.plan.checked:
            into.append(torch.empty(len(bucket.tensors), dtype=torch.int64, device=self._link.device))
        return Travelling.on(self._link, into)

    def _take_the_rest(self, number: int, arriving: deque[Travelling], version: int) -> None:
        """`number` is the next bucket. Whoever stopped has a reason that counts more than what happens to the rest."""
        try:
            with self._link.guard(version):
                while arriving:
                    arriving.popleft().wait()
                    if number + 1 < len(self.plan.buckets):
                        number += 1
                        arriving.append(self._expect(number))
        except TransferError:
            self._link.close()


@dataclass
class Travelling:
    """A bucket on its way, in pieces. Holds what it sends, or receives into."""

    link: Link
    tensors: list[torch.Tensor]
    works: list[OnItsWay]

    @classmethod
    def on(cls, link: Link, tensors: list[torch.Tensor]) -> Travelling:
        return cls(link, tensors, [link.broadcast(tensor) for tensor in tensors if tensor.numel()])

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            self.link.wait(work)
        self.link.synchronise()
        return self.tensors


def _two_buffers(plan: TransferPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (torch.empty(plan.largest, dtype=torch.uint8, device=device) for _ in range(2))
    return first, second
