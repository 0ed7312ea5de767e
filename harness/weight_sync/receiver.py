"""Both ends of a transfer, whatever carries it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from harness.weight_sync.plan import TransferPlan, pack


class WeightReceiver(Protocol):
    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of every parameter of `version`; a tensor lives until the next one is asked for."""


class WeightSender(Protocol):
    def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Hand out the trainer's weights as `version`. Every training rank calls it with its shards."""


class WeightOffer(Protocol):
    """What a receiver needs to know to join; small and picklable."""

    @property
    def plan(self) -> TransferPlan: ...

    def receiver(self, number: int, device: torch.device) -> WeightReceiver:
        """Join as receiver `number` (from 0). Blocks until the transport is up on all sides."""


class Follower:
    """The sender of training ranks other than 0: takes its part in gathering shards, and keeps nothing."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan

    def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        for bucket in self.plan.buckets:
            pack(bucket, parameters, None)
