"""Weights that take their time: none that travel (virtual), or real ones, no faster than a cost model says (paced)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from harness.config.transports import TransferTimes, transport_of
from harness.protocols import Clock
from harness.runtime.runtime import Wire
from harness.weight_sync.endpoints import HostReceiver, HostSender, SentOffer, WeightOffer, WeightReceiver, WeightSender
from harness.weight_sync.host_staged import require_sent, require_staged
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.transports import (
    Receiver,
    Sender,
    TransferOutcome,
    join_all,
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
        await join_all(receivers, SimulatedOffer(plan, self.times, self.clock), [1] * len(receivers))

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


@dataclass(frozen=True)
class SimulatedOffer:
    """An offer of weights that only take their time."""

    plan: TransferPlan
    times: TransferTimes
    clock: Clock

    def receiver(
        self, number: int, device: torch.device, previous: WeightReceiver | HostReceiver | None = None
    ) -> SimulatedReceiver:
        staged = previous.kept if isinstance(previous, SimulatedReceiver) else frozenset[int]()
        return SimulatedReceiver(self.times, self.clock, staged)


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
    """A receiver that yields no tensors. staged: versions that are there from before its transport was connected
    anew."""

    def __init__(self, times: TransferTimes, clock: Clock, staged: Collection[int] = ()) -> None:
        self._times, self._clock = times, clock
        self._staged = set(staged)

    @property
    def kept(self) -> frozenset[int]:
        """Versions that have arrived, and were not loaded."""
        return frozenset(self._staged)

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    async def stage(self, version: int) -> None:
        await self._clock.sleep(self._times.stage_s)
        self._staged.add(version)

    def staged(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        require_staged(version, self._staged)
        self._staged = {newer for newer in self._staged if newer > version}
        return iter(())


class PacedSender:
    """A real sender that takes at least as long as the cost model says, until the trainer may go on."""

    def __init__(self, sender: WeightSender, times: TransferTimes, clock: Clock) -> None:
        self._sender, self._times, self._clock = sender, times, clock

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        start = self._clock.now()
        await self._sender.send(version, parameters)
        await self._clock.sleep(max(0.0, self._times.send_s - (self._clock.now() - start)))

    async def ready(self) -> None:
        if isinstance(self._sender, HostSender):
            await self._sender.ready()

    async def wait_arrived(self, version: int) -> None:
        if isinstance(self._sender, HostSender):
            await self._sender.wait_arrived(version)

    async def resend(self, version: int) -> None:
        assert isinstance(self._sender, HostSender)
        await self._sender.resend(version)


class PacedReceiver:
    """A real receiver into host memory that takes at least as long as the cost model says."""

    def __init__(self, receiver: HostReceiver, times: TransferTimes, clock: Clock) -> None:
        self._receiver, self._times, self._clock = receiver, times, clock

    async def stage(self, version: int) -> None:
        start = self._clock.now()
        await self._receiver.stage(version)
        await self._clock.sleep(max(0.0, self._times.stage_s - (self._clock.now() - start)))

    def staged(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return self._receiver.staged(version)


@dataclass(frozen=True)
class PacedOffer:
    """A real offer whose receivers into host memory are paced; those that load at once are paced by their engine."""

    offer: WeightOffer
    times: TransferTimes
    clock: Clock

    @property
    def plan(self) -> TransferPlan:
        return self.offer.plan

    def receiver(
        self, number: int, device: torch.device, previous: WeightReceiver | HostReceiver | None = None
    ) -> WeightReceiver | HostReceiver:
        paced = previous._receiver if isinstance(previous, PacedReceiver) else previous
        receiver = self.offer.receiver(number, device, paced)
        if isinstance(receiver, HostReceiver):
            return PacedReceiver(receiver, self.times, self.clock)
        return receiver


class PacedRole:
    """A role, of whatever kind, whose real transfers take at least as long as the cost model says."""

    def __init__(self, role: Any, times: TransferTimes) -> None:
        self._role, self._times = role, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    async def join(self, offer: Annotated[WeightOffer, Wire(SentOffer)], number: int) -> None:
        """Join as a receiver that is no faster than the cost model says."""
        await self._role.join(PacedOffer(offer, self._times, self._role.clock), number)

    async def meet_receivers(self) -> None:
        """Meet the receivers as a sender that is no faster than the cost model says."""
        await self._role.meet_receivers()
        await self._role.use(PacedSender(self._role.joined, self._times, self._role.clock))
