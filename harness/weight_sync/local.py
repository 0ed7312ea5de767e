"""Weights between roles of one worker: what was built beside the trainer reads its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.protocols import TrainEngine
from harness.weight_sync.plan import TransferPlan, gathered
from harness.weight_sync.transports import Receiver, Sender, TransferOutcome, send_and_receive


class LocalSender:
    """The sender of a trainer whose weights are read where they are."""

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: nothing travels."""


class LocalReceiver:
    """Reads the parameters of the training rank in the same process: by reference where it has them whole, else
    gathered from all ranks, which have to load at the same time."""

    def __init__(self, trainer: TrainEngine) -> None:
        self._trainer = trainer

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, gathered(parameter)) for name, parameter in self._trainer.named_parameters().items())


@dataclass(frozen=True)
class LocalTransport:
    """The driver's side: both ends were built connected."""

    timeout_s = None

    async def connect(self, trainers: Sequence[Sender], receivers: Sequence[Receiver], plan: TransferPlan) -> None:
        """Do nothing: they were built connected."""

    async def transfer(
        self, trainers: Sequence[Sender], receivers: Sequence[Receiver], version: int
    ) -> TransferOutcome:
        """Ask both sides at once; nothing travels: the weights are there since the step."""
        return await send_and_receive(trainers, receivers, version)

    def sending(self, trainers: Sequence[Sender]) -> Sequence[Sender]:
        return trainers

    async def abort(self) -> None:
        """Do nothing: whatever dies takes its worker with it."""
