"""Transports of weights: the calls that connect one, the order in which both sides act, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch

from harness.config.placement import sending_ranks
from harness.config.transports import transport_of
from harness.protocols import EngineDied, Span, TrainEngine, TransferError
from harness.rpc.sockets import forget, meeting_place
from harness.runtime.runtime import Handle, WorkerDied, ask_all
from harness.weight_sync.endpoints import ReceivingWorker, SendingWorker
from harness.weight_sync.plan import TransferPlan, all_gathered
from harness.weight_sync.process_group import Rendezvous

Role = TypeVar("Role")
Sender = Handle[SendingWorker]
Receiver = Handle[ReceivingWorker]
OnDeath = Callable[[], Awaitable[None]]
"""The action taken at once where one end of a transfer dies."""


@dataclass
class TransferOutcome:
    """The outcome of a step of a transfer: the spans of each worker that succeeded, the errors of the others by
    name."""

    spans: list[list[Span]] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)

    def __add__(self, other: TransferOutcome) -> TransferOutcome:
        return TransferOutcome(self.spans + other.spans, self.failed | other.failed)

    def succeeded(self, handles: Sequence[Handle[Role]]) -> list[Handle[Role]]:
        """The handles that did not fail."""
        return [handle for handle in handles if handle.name not in self.failed]

    def skipping(self, receivers: Sequence[Receiver]) -> TransferOutcome:
        """The same, where these failures kept receivers from being called at all: none of them got anything."""
        first = next(iter(self.failed.values()))
        errors = {receiver.name: TransferError(f"nothing was sent: {first}") for receiver in receivers}
        return self + TransferOutcome(failed=dict(errors))


@dataclass
class GroupTransport:
    """A transport between real processes, which meet as a process group: in a file of one host's, or where the first
    that sends is, which others reach by its `host_of`. Their waits end after timeout_s."""

    name: str
    host_of: Callable[[Sender], str]
    timeout_s: float
    _rendezvous: Rendezvous | None = field(default=None, init=False, compare=False)
    _place: str = field(default="", init=False, compare=False)
    _senders: int = field(default=1, init=False, compare=False)

    async def connect(self, trainers: Sequence[Sender], receivers: Sequence[Receiver], plan: TransferPlan) -> None:
        """Give every training rank its sender, and each receiver its end; returns when all have joined. Again, where
        the receivers are others than before, or one side failed."""
        senders = self._senders = sending_ranks(self.name, len(trainers), None if plan.in_stages else len(plan.buckets))
        await ask_all(trainers[senders:], lambda actor: actor.gather_only(plan, senders))
        first, *beside = trainers[:senders]
        ends = await ask_all(receivers, lambda receiver: receiver.ends(self.name))
        self.close()
        self._place = meeting_place(self.host_of(first))
        sent = await first.role.open(self.name, plan, self._place, sum(ends), self.timeout_s, senders)
        offer = sent.opened()
        self._rendezvous = offer.rendezvous
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(first.role.meet_receivers())
                for number, sender in enumerate(beside, start=1):
                    tasks.create_task(sender.role.send_beside(sent, number))
                for receiver, number in zip(receivers, accumulate(ends, initial=0), strict=False):
                    tasks.create_task(receiver.role.join(sent, number))
        except Exception:
            await self.abort()
            raise
        finally:
            offer.withdraw()

    async def transfer(
        self, trainers: Sequence[Sender], receivers: Sequence[Receiver], version: int
    ) -> TransferOutcome:
        """Bring the trained weights to every receiver, and load them there."""
        steps = stage_then_swap if transport_of(self.name).staged else send_and_receive
        return await steps(trainers, receivers, version, self.timeout_s, self.abort)

    def sending(self, trainers: Sequence[Sender]) -> Sequence[Sender]:
        """Training ranks that send, as they are connected; the others help to gather."""
        return trainers[: self._senders]

    def close(self) -> None:
        """Remove the file where its ends met, if they are of one host: nobody meets there any more."""
        forget(self._place)

    async def abort(self) -> None:
        """End all waits after one end died: the others are not to wait for it. They have to be connected again."""
        if self._rendezvous is not None:
            await asyncio.to_thread(self._rendezvous.abort)


async def ask_each(
    handles: Sequence[Handle[Role]],
    ask: Callable[[Role], Coroutine[Any, Any, list[Span] | None]],
    what: str,
    *,
    timeout_s: float | None = None,
    on_death: OnDeath | None = None,
) -> TransferOutcome:
    """Ask the same of every role at once; all answers are awaited. One that fails does not cancel the others: they are
    ends of one transfer, which each leaves on its own, or because `on_death` aborts it. what: for the message of one
    that does not answer."""
    asked = (_ask(handle, ask, what, timeout_s, on_death) for handle in handles)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    outcome = TransferOutcome()
    for handle, answer in zip(handles, answers, strict=True):
        if isinstance(answer, Exception):
            outcome.failed[handle.name] = answer
        elif isinstance(answer, BaseException):
            raise answer
        elif answer is not None:
            outcome.spans.append(answer)
    return outcome


async def _ask(
    handle: Handle[Role],
    ask: Callable[[Role], Coroutine[Any, Any, list[Span] | None]],
    what: str,
    timeout_s: float | None,
    on_death: OnDeath | None,
) -> list[Span] | None:
    # Twice: a worker that waits for a peer gives up after once, and says so itself.
    limit = None if timeout_s is None else 2 * timeout_s
    try:
        async with asyncio.timeout(limit):
            return await ask(handle.role)
    except (WorkerDied, EngineDied):
        if on_death is not None:
            await on_death()
        raise
    except TimeoutError as error:
        raise TimeoutError(f"{handle.name} did not {what} within {limit} s") from error


async def send_and_receive(
    trainers: Sequence[Sender],
    receivers: Sequence[Receiver],
    version: int,
    timeout_s: float | None = None,
    on_death: OnDeath | None = None,
) -> TransferOutcome:
    """Send and load at once: both sides have to take part."""
    sent, received = await asyncio.gather(
        _publish(trainers, version, on_death), _load(receivers, version, timeout_s, on_death)
    )
    return sent + received


async def stage_then_swap(
    trainers: Sequence[Sender],
    receivers: Sequence[Receiver],
    version: int,
    timeout_s: float | None = None,
    on_death: OnDeath | None = None,
) -> TransferOutcome:
    """All steps of a staged transfer, one after the other."""
    copied = await _publish(trainers, version)
    if copied.failed:
        return copied.skipping(receivers)
    staged = await stage(receivers, version, timeout_s, on_death)
    return copied + staged + await swap(staged.succeeded(receivers), version, timeout_s)


async def write_then_read(trainers: Sequence[Sender], receivers: Sequence[Receiver], version: int) -> TransferOutcome:
    """Let receivers read what all ranks have written."""
    written = await _publish(trainers, version)
    return written.skipping(receivers) if written.failed else written + await _load(receivers, version)


async def _publish(trainers: Sequence[Sender], version: int, on_death: OnDeath | None = None) -> TransferOutcome:
    return await ask_each(trainers, lambda actor: actor.send(version), f"send version {version}", on_death=on_death)


async def _load(
    receivers: Sequence[Receiver], version: int, timeout_s: float | None = None, on_death: OnDeath | None = None
) -> TransferOutcome:
    what = f"load version {version}"
    return await ask_each(receivers, lambda role: role.load(version), what, timeout_s=timeout_s, on_death=on_death)


async def stage(
    receivers: Sequence[Receiver], version: int, timeout_s: float | None, on_death: OnDeath | None
) -> TransferOutcome:
    """Bring a version into the host memory of each receiver."""
    what = f"stage version {version}"
    return await ask_each(receivers, lambda role: role.stage(version), what, timeout_s=timeout_s, on_death=on_death)


async def swap(receivers: Sequence[Receiver], version: int, timeout_s: float | None = None) -> TransferOutcome:
    """Let each receiver load what it has staged."""
    return await ask_each(receivers, lambda role: role.swap(version), f"swap to version {version}", timeout_s=timeout_s)


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
        return all_gathered(self._trainer.named_parameters(), self._trainer.holders())


@dataclass(frozen=True)
class LocalTransport:
    """The driver's side: both ends were built connected. helpers: training ranks that have no engine beside them, and
    help the others to gather what these load."""

    helpers: Sequence[int] = ()
    timeout_s = None

    async def connect(self, trainers: Sequence[Sender], receivers: Sequence[Receiver], plan: TransferPlan) -> None:
        """Do nothing: they were built connected."""

    async def transfer(
        self, trainers: Sequence[Sender], receivers: Sequence[Receiver], version: int
    ) -> TransferOutcome:
        """Ask both sides at once; nothing travels: the weights are there since the step."""
        helping = [trainers[rank] for rank in self.helpers]
        loaded, helped = await asyncio.gather(
            send_and_receive(trainers, receivers, version),
            ask_each(helping, lambda actor: actor.help_load(version), f"help to load version {version}"),
        )
        return loaded + helped

    def sending(self, trainers: Sequence[Sender]) -> Sequence[Sender]:
        return trainers

    async def abort(self) -> None:
        """Do nothing: whatever dies takes its worker with it."""
