"""Weights that take their time, and do not travel. Real ones of a paced run do, no faster than a cost model says:
`pace` of their workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from harness.config.transports import TransferTimes, transport_of
from harness.protocols import Clock
from harness.weight_sync.host_staged import require_sent, require_staged
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.transports import (
    Receiver,
    Sender,
    TransferOutcome,
    send_and_receive,
    stage_then_swap,
    write_then_read,
)


@dataclass
class SimulatedTransport:
    """Stands in for the transport of this name: the same calls in the same order. Engines let their loads pass."""

    name: str
    times: TransferTimes
    clock: Clock
    _sender: SimulatedSender | None = field(default=None, init=False, compare=False)
    timeout_s = None

    async def connect(self, trainers: Sequence[Sender], receivers: Sequence[Receiver], plan: TransferPlan) -> None:
        self._sender = SimulatedSender(self.times, self.clock, self._sender)
        await trainers[0].role.use(self._sender)
        for receiver in receivers:
            await receiver.role.use(SimulatedReceiver(self.times, self.clock))

    async def transfer(
        self, trainers: Sequence[Sender], receivers: Sequence[Receiver], version: int
    ) -> TransferOutcome:
        stands_for = transport_of(self.name)
        steps = stage_then_swap if stands_for.staged else write_then_read if stands_for.in_turn else send_and_receive
        return await steps(trainers, receivers, version)

    def sending(self, trainers: Sequence[Sender]) -> Sequence[Sender]:
        """The first rank, which stands for all."""
        return trainers[:1]

    async def abort(self) -> None:
        """Do nothing: nothing waits."""


class SimulatedSender:
    """A sender for which the trainer waits `send_s`; what travels on in the background has arrived `stage_s` later.
    previous: what it had under way can be sent again."""

    def __init__(self, times: TransferTimes, clock: Clock, previous: SimulatedSender | None = None) -> None:
        self._times, self._clock = times, clock
        self._version: int = 0 if previous is None else previous._version
        self._arrives_at = 0.0

    async def ready(self) -> None:
        await self.wait_arrived(self._version)

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        await self.ready()
        await self._clock.sleep(self._times.send_s)
        self._version, self._arrives_at = version, self._clock.now() + self._times.stage_s

    async def wait_arrived(self, version: int) -> None:
        require_sent(version, self._version)
        left = self._arrives_at - self._clock.now()
        if left > 0:
            await self._clock.sleep(left)

    async def resend(self, version: int) -> None:
        require_sent(version, self._version)
        self._arrives_at = self._clock.now() + self._times.stage_s


class SimulatedReceiver:
    """A receiver that yields no tensors."""

    def __init__(self, times: TransferTimes, clock: Clock) -> None:
        self._times, self._clock = times, clock
        self._staged = set[int]()

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    async def stage(self, version: int) -> None:
        await self._clock.sleep(self._times.stage_s)
        self._staged.add(version)

    def staged(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        require_staged(version, self._staged)
        self._staged = {newer for newer in self._staged if newer > version}
        return iter(())
