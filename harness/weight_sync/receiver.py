"""Both ends of a transfer, whatever carries it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch.distributed import Store

from harness.weight_sync.plan import TransferPlan, pack


@runtime_checkable
class WeightReceiver(Protocol):
    """The end of a transport that hands weights over while they travel."""

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of every parameter of `version`; a tensor lives until the next one is asked for.

        Raises TransferError where it does not arrive whole. Who stops before the end calls `stop_reading`.
        """


@runtime_checkable
class HostReceiver(Protocol):
    """The end of a transport that brings weights to host memory first, while their user goes on with the old ones."""

    async def stage(self, version: int) -> None:
        """Fill host memory with `version`; returns when it is all there. Raises TransferError where it is not."""

    def staged(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of every parameter of what was staged as `version`. Once it was read to its end, this
        version and older ones are forgotten.

        Raises ValueError, naming the versions that are there, where this one is not.
        """


class WeightSender(Protocol):
    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Hand out the trainer's weights as `version`; every training rank calls it with its shards. When it returns,
        the trainer may change them. Raises TransferError where they did not get to all receivers."""


@runtime_checkable
class HostSender(WeightSender, Protocol):
    """A sender whose weights still travel when `send` has returned."""

    async def wait_arrived(self, version: int) -> None:
        """Wait until `version`, the last one sent, has left for all receivers. Raises TransferError, naming the
        version, where it did not get there."""

    async def resend(self, version: int) -> None:
        """Let the last version that was sent travel once more. Returns at once."""


class WeightSource(Protocol):
    """What makes the sender."""

    def sender(self, store: Store, device: torch.device, before: WeightSender | None = None) -> WeightSender:
        """Join; `store` comes from `open_rendezvous`. Blocks until all receivers have joined. `before`: the sender that
        this one takes the place of, after receivers changed or a transfer failed."""


class WeightOffer(Protocol):
    """What a receiver needs to know to join; small and picklable."""

    @property
    def plan(self) -> TransferPlan: ...

    def receiver(
        self, number: int, device: torch.device, before: WeightReceiver | HostReceiver | None = None
    ) -> WeightReceiver | HostReceiver:
        """Join as receiver `number` (from 0). Blocks until the transport is up on all sides. `before`: the receiver
        that this one takes the place of, after receivers changed or a transfer failed.

        Raises TransferError where they did not meet."""


def stop_reading(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Let what was not read of `weights` go by, so that others get theirs; nothing is left of what was read whole."""
    close = getattr(weights, "close", None)
    if close is not None:
        close()


class GatherOnlySender:
    """The sender of training ranks other than 0: takes its part in gathering shards, and keeps nothing."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        for bucket in self.plan.buckets:
            pack(bucket, parameters, None)
