"""Both ends of a transfer: what a transport provides, and the calls by which the coordinator drives the workers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self, get_args, runtime_checkable

import torch
import torch.distributed as dist

from harness.config.transports import TransferTimes, transport_of
from harness.protocols import Clock, FromTrainer, ReceivingEngine, Span, TrainEngine, TransferOffer
from harness.runtime.runtime import Waits
from harness.weight_sync.plan import TransferPlan, pack, plan_transfer
from harness.weight_sync.process_group import GroupOffer, open_rendezvous


@runtime_checkable
class WeightReceiver(Protocol):
    """The end of a transport that hands weights over while they travel."""

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of every parameter of `version`; a tensor is valid until the next one is asked for.

        Raises TransferError where it does not arrive whole. A reader that stops before the end calls `stop_reading`.
        """


@runtime_checkable
class HostReceiver(Protocol):
    """The end of a transport that brings weights to host memory first, while the engine goes on with the old ones."""

    async def stage(self, version: int) -> None:
        """Fill host memory with `version`; returns when all of it is there. Raises TransferError where it is not."""

    def staged(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of every parameter of what was staged as `version`. Once it has been read to its end,
        this version and older ones are dropped.

        Raises ValueError, naming the versions that are there, where this one is not.
        """


class WeightSender(Protocol):
    """The sending end on a training rank."""

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Send the trainer's weights as `version`; every training rank calls it with its shards. When it returns, the
        trainer may change them. Raises TransferError where they did not get to all receivers."""


@runtime_checkable
class HostSender(WeightSender, Protocol):
    """A sender whose weights still travel when `send` has returned."""

    async def ready(self) -> None:
        """Wait until the last version has left for all receivers, so that `send` only copies. Raises its error."""

    async def wait_arrived(self, version: int) -> None:
        """Wait until `version`, the last one sent, has left for all receivers. Raises TransferError, naming the
        version, where it did not get there."""

    async def resend(self, version: int) -> None:
        """Send the last version once more. Returns at once."""


class WeightSource(Protocol):
    """A maker of senders."""

    def sender(
        self, store: dist.Store, device: torch.device, previous: WeightSender | None = None, number: int = 0
    ) -> WeightSender:
        """Join as sender `number`, which is a training rank; `store` is the rendezvous's. Blocks until all receivers
        have joined. `previous`: the sender that this one replaces, after receivers changed or a transfer failed."""


@dataclass(frozen=True)
class SentOffer:
    """An offer on its way from the trainer: its transport by name, or import path; its class, and its bytes."""

    transport: str
    kind: str
    data: bytes

    @classmethod
    def of(cls, transport: str, offer: GroupOffer) -> Self:
        """Encode an offer of this transport."""
        from harness.runtime.messages import encode

        return cls(transport, type(offer).__name__, encode(offer))

    def opened(self) -> GroupOffer:
        """Decode it. Raises ConfigError where this process has no such transport."""
        from harness.runtime.messages import decode

        offers = transport_of(self.transport).with_ends().offers
        kinds = {kind.__name__: kind for kind in get_args(offers) or (offers,)}
        offer: GroupOffer = decode(self.data, kinds[self.kind])
        return offer

    @property
    def plan(self) -> TransferPlan:
        """The buckets in which weights travel."""
        return self.opened().plan

    def for_engine(self) -> TransferOffer:
        """The same for processes of an engine, which import neither this nor what it came with."""
        from harness.runtime.messages import encode

        shapes = {spec.name: spec.shape for bucket in self.plan.buckets for spec in bucket.tensors}
        return TransferOffer(f"{__name__}:{receiver_of.__name__}", encode(self), shapes)

    def receiver(
        self, number: int, device: torch.device, previous: WeightReceiver | HostReceiver | None = None
    ) -> WeightReceiver | HostReceiver:
        """Join as `GroupOffer.receiver`."""
        return self.opened().receiver(number, device, previous)


def receiver_of(data: bytes, number: int, device: torch.device, previous: Any = None) -> Any:
    """Join by an encoded `SentOffer`, in whichever process this is: `harness.protocols.TransferOffer`."""
    from harness.runtime.messages import decode

    offer: SentOffer = decode(data, SentOffer)
    return offer.receiver(number, device, previous)


class ElsewhereReceiver:
    """The receiver of a worker whose engine's own processes receive."""

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return FromTrainer()


class GatherOnlySender:
    """The sender of a training rank that sends nothing: takes part in gathering shards for so many senders, and keeps
    nothing."""

    def __init__(self, plan: TransferPlan, senders: int = 1) -> None:
        self.plan, self._owners = plan, plan.owners(senders)

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        for bucket, owner in zip(self.plan.buckets, self._owners, strict=True):
            pack(bucket, parameters, None, owner)


class SendingWorker:
    """A training rank as the coordinator sees it. The role has a name, a clock, waits, a device and an engine."""

    name: str
    engine: TrainEngine
    clock: Clock
    waits: Waits
    device: torch.device
    sender: WeightSender | None = None
    pace: TransferTimes | None = None
    """The least that transfers take, where they are real and the engines are not."""
    _source: WeightSource
    _store: dist.Store

    def turn(self, loop: str) -> AbstractAsyncContextManager[None]:
        """Take this rank's turn on its device, for what one of its loops computes there."""
        return nullcontext()

    async def settled_version(self) -> int:
        """The version of the weights as they are; between two steps of a batch they are of none, and its last one is
        waited for."""
        raise NotImplementedError

    async def open_batch(self) -> int:
        """Wait until steps of a batch were made, rows of which may still be to come; the batch."""
        raise NotImplementedError

    async def plan(self, bucket_bytes: int, checked: bool = False, delta: bool = False) -> TransferPlan:
        """The transfer plan of this model's weights."""
        engine = self.engine
        return plan_transfer(engine.named_parameters().items(), bucket_bytes, checked, delta, engine.holders())

    async def gather_only(self, plan: TransferPlan, senders: int) -> None:
        """Help to gather and send nothing: on ranks that are none of the first `senders`."""
        await self.use(GatherOnlySender(plan, senders))

    async def open(
        self, transport: str, plan: TransferPlan, place: str, receivers: int, timeout_s: float, senders: int = 1
    ) -> SentOffer:
        """Offer, on rank 0, the weights of the first `senders` ranks by this transport; all meet at this place
        (`harness.runtime.stores.open_store`). `meet_receivers` must follow, and `send_beside` of the other senders,
        while the receivers join."""
        rendezvous, self._store = open_rendezvous(place, receivers, timeout_s, senders)
        within_gpu = self.device.type == "cuda" and _alone()
        carrier = transport_of(transport).with_ends()
        self._source, offer = carrier.offer(plan, rendezvous, self.device, within_gpu=within_gpu)
        return SentOffer.of(transport, offer)

    async def meet_receivers(self) -> None:
        """Complete, on rank 0, what `open` began. What the previous sender had under way can be sent again."""
        await self.use(self._source.sender(self._store, self.device, self.sender))

    async def send_beside(self, sent: SentOffer, number: int) -> None:
        """Join, as rank `number`, one of the other senders, the group of its own, while all receivers do."""
        offer = sent.opened()
        await self.use(offer.sender(offer.rendezvous.connect(), self.device, self.sender, number))

    async def use(self, sender: WeightSender) -> None:
        """Send weights by this sender, which reaches its receivers already."""
        self.sender = sender

    async def send(self, version: int) -> list[Span]:
        """Send the weights, now called `version`; returns when the trainer may go on.

        By broadcast, every receiver must be in `load` meanwhile. To host memory, they travel on in the background; the
        version before leaves first, and until it has, the device is free for others.
        """
        if self.sender is None:
            raise RuntimeError("send before the transport was opened; see Coordinator.connect")
        if isinstance(self.sender, HostSender):
            with self.waits("send", "the version before to leave"):
                await self.sender.ready()
        async with self.turn("send"):
            start = self.clock.now()
            with self.waits("send", f"version {version} to be taken"):
                await self.sender.send(version, self.engine.named_parameters())
                if self.pace is not None:
                    await _pass(self.pace.send_s, start, self.clock)
            end = self.clock.now()
        return [Span("actor", self.name, "publish_weights", start, end, version, version - 1)]

    async def help_load(self, version: int) -> list[Span]:
        """Gather with the other ranks what engines beside some of them load as `version`, and keep nothing."""
        raise NotImplementedError

    async def wait_arrived(self, version: int) -> None:
        """Wait until `version`, the last one sent, left for all receivers, where it travels in the background."""
        if isinstance(self.sender, HostSender):
            with self.waits("wait_arrived", f"version {version} to leave"):
                await self.sender.wait_arrived(version)

    async def resend(self, version: int) -> None:
        """Send `version`, the last one sent, once more in the background. For ranks that send."""
        assert isinstance(self.sender, HostSender), "only what is kept in host memory can be sent again"
        await self.sender.resend(version)


class ReceivingWorker(ABC):
    """An engine or a scorer as the coordinator sees it."""

    role: str
    name: str
    clock: Clock
    waits: Waits
    device: torch.device
    receiver: WeightReceiver | HostReceiver | None = None
    pace: TransferTimes | None = None
    """The same as a sender's; loads are paced by their engine."""

    @property
    def receiving_engine(self) -> ReceivingEngine | None:
        """The engine, where it has processes which can receive weights themselves."""
        return None

    async def ends(self, transport: str) -> int:
        """Receivers that it is, by this transport. Into host memory each worker receives for its engine, which goes on
        meanwhile."""
        engine = self.receiving_engine
        return 1 if engine is None or transport_of(transport).staged else engine.ends

    async def join(self, offer: SentOffer, number: int) -> None:
        """Become receiver `number` of the trainer's weights, or with its engine's processes so many from there on;
        again, where receivers changed or a transfer failed."""
        engine = self.receiving_engine
        if engine is None or transport_of(offer.transport).staged:
            self.receiver = offer.receiver(number, self.device, self.receiver)
            return
        await engine.join(offer.for_engine(), number)
        self.receiver = ElsewhereReceiver()

    async def use(self, receiver: WeightReceiver | HostReceiver) -> None:
        """Take weights from this receiver, which needs not join, or from the one that is there, with what it staged."""
        self.receiver = self.receiver or receiver

    async def load(self, version: int) -> list[Span]:
        """Take the weights of `version` from the trainer."""
        assert isinstance(self.receiver, WeightReceiver), "load before join, or by a transport that stages"
        weights = self.receiver.receive(version)
        try:
            return await self._load(version, weights)
        finally:
            stop_reading(weights)

    async def stage(self, version: int) -> list[Span]:
        """Take `version` into host memory, whatever the engine does meanwhile."""
        start = self.clock.now()
        with self.waits("stage", f"version {version} to arrive"):
            await self._host_receiver.stage(version)
            if self.pace is not None:
                await _pass(self.pace.stage_s, start, self.clock)
        return [Span(self.role, self.name, "stage_weights", start, self.clock.now(), version, version - 1)]

    async def swap(self, version: int) -> list[Span]:
        """Take the weights of `version` from host memory, where `stage` brought them."""
        return await self._load(version, self._host_receiver.staged(version))

    @property
    def _host_receiver(self) -> HostReceiver:
        assert isinstance(self.receiver, HostReceiver), "staging needs weights that travel in the background"
        return self.receiver

    @abstractmethod
    async def _load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Span]:
        """Load into the engine, as `version`, when nothing else uses it."""


class EngineWorker(ReceivingWorker):
    """A rollout engine, which may leave a run and come back."""

    @abstractmethod
    async def retire(self) -> None:
        """Take no more groups; finish those that it has, under the loaded weights. Returns when they are done."""

    @abstractmethod
    async def rejoin(self) -> None:
        """Take groups again."""

    @abstractmethod
    async def waiting(self) -> list[str]:
        """Lines on what its loops wait for."""


def stop_reading(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Let what was not read of `weights` pass, so that the other receivers get it all."""
    close = getattr(weights, "close", None)
    if close is not None:
        close()


async def _pass(seconds: float, start: float, clock: Clock) -> None:
    """Wait until so many seconds have passed since the start."""
    await clock.sleep(max(0.0, seconds - (clock.now() - start)))


def _alone() -> bool:
    """Whether the training world is this rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1
