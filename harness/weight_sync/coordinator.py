"""Who takes part in a weight transfer, which version each holds, and what may happen at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.protocols import Span
from harness.runtime.handles import Handle, call_all
from harness.runtime.waits import Waits
from harness.weight_sync.delivery import Delivery
from harness.weight_sync.membership import Membership
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.wires import Outcome, Wire, ask

__all__ = ["Care", "Coordinator", "LostEngine", "Wire"]


@dataclass(frozen=True)
class Care:
    """What is done so that weights arrive. attempts: how often a transfer is tried; verify: hold every tensor against
    its digest; on_lost: whether the run ends or goes on without an engine that does not get its weights."""

    attempts: int = 3
    verify: bool = False
    on_lost: Literal["end", "go_on"] = "end"


class LostEngine(RuntimeError):
    """Engines did not get a version; they hold the one that they had. The message names them, with the reason."""


class Coordinator:
    """The weights of one job.

    trainers: the training ranks in order; engines: they take a version when the schedule says so; scorers: they take
    each as soon as it is there. Engines come and go between transfers. At most one staged transfer is under way. Where
    one fails for good, its error is raised by every call from then on, and by `finish`: the run ends. `on_lost` hears
    of each engine that the run goes on without.
    """

    def __init__(
        self,
        trainers: Sequence[Handle],
        *,
        engines: Sequence[Handle],
        scorers: Sequence[Handle] = (),
        wire: Wire,
        bucket_bytes: int,
        observe: Callable[[Iterable[Span]], None],
        care: Care | None = None,
        on_lost: Callable[[Handle, str], Awaitable[None]] | None = None,
    ) -> None:
        self.trainers, self.engines, self.scorers = list(trainers), list(engines), list(scorers)
        self.membership = Membership()
        for engine in engines:
            self.membership.join(engine.name)
        for scorer in scorers:
            self.membership.join(scorer.name, kind="scorer")
        self.plan: TransferPlan | None = None
        self.care = care or Care()
        self.waits = Waits("weights")
        self._wire, self._bucket_bytes, self._observe, self._on_lost = wire, bucket_bytes, observe, on_lost
        self._delivery = Delivery(trainers, wire, attempts=self.care.attempts, observe=observe)
        self._arrived = 0
        self._news = asyncio.Event()  # a version arrived, or a transfer ended; then there is a new one
        self._transfer: asyncio.Task[None] | None = None

    @property
    def receivers(self) -> list[Handle]:
        return [*self.engines, *self.scorers]

    @property
    def versions(self) -> dict[str, int]:
        """What each receiver holds, by name."""
        return self.membership.versions

    async def connect(self) -> None:
        """Compute the plan and bring the wire up on all sides."""
        source, followers = self.trainers[0], self.trainers[1:]
        plan: TransferPlan = await source.call("plan", self._bucket_bytes, self.care.verify)
        await call_all(followers, "follow", plan)
        self._delivery.follow(plan)
        await self._delivery.connect(self.receivers)
        self.plan = plan

    def add(self, engine: Handle, version: int) -> None:
        """Another engine, which holds `version`: it takes part from the next transfer on."""
        self.membership.join(engine.name, version=version)
        self.engines.append(engine)

    def remove(self, engine: Handle) -> None:
        """This engine takes part in no later transfer."""
        self.membership.leave(engine.name)
        self.engines.remove(engine)

    async def publish(self, version: int) -> None:
        """Bring the trained weights to every receiver as `version`.

        What a receiver took is its version from then on. Raises LostEngine, or what no other attempt would mend.
        """
        await self.finish()

        async def carry(receivers: Sequence[Handle], attempt: int) -> Outcome:
            outcome = await self._wire.publish(self.trainers, receivers, version)
            self._note(outcome.fine(receivers), version)
            return outcome

        await self._settle(version, await self._delivery.bring(version, self.receivers, carry))
        self._arrived = version

    async def stage(self, version: int) -> None:
        """Wait for the transfer before, copy the trained weights to the trainer's host memory, and let them travel.

        Returns when the copy is complete: then the trainer may change its weights.
        """
        await self.finish()
        await self._delivery.connect(self.receivers)  # the copy travels as soon as it is there
        self._record(await call_all(self.trainers, "publish", version))
        self._transfer = asyncio.create_task(self._carry(version))
        self._transfer.add_done_callback(lambda _: self._tell())

    async def arrived(self, version: int) -> None:
        """Wait until `version`, staged already or not, is in the host memory of every engine."""
        with self.waits("arrived", f"version {version} to be staged and to arrive"):
            while self._arrived < version and not self._failed:
                await self._news.wait()
        if self._failed:
            await self.finish()

    async def swap(self, handles: Sequence[Handle], version: int) -> None:
        """These receivers load `version` from their host memory, once it has arrived there."""
        await self.arrived(version)
        await self._swap(handles, version)

    async def finish(self) -> None:
        """Wait for the transfer under way, if any; raises its error, also when that was raised before."""
        if self._transfer is not None:
            with self.waits("finish", f"the transfer after version {self._arrived} to end"):
                await asyncio.shield(self._transfer)

    async def waiting(self) -> list[str]:
        """What waits here, a line each."""
        return self.waits.told()

    @property
    def _failed(self) -> bool:
        """Whether the last transfer ended, and not well."""
        transfer = self._transfer
        return transfer is not None and transfer.done() and (transfer.cancelled() or transfer.exception() is not None)

    async def _carry(self, version: int) -> None:
        """Consumes the trainer's host copy, produces the receivers'. Waits for all ends of the wire, which give up on
        each other by its timeout. What is busy computing answers late, and must not keep engines from their weights."""

        async def carry(receivers: Sequence[Handle], attempt: int) -> Outcome:
            if attempt > 1 and (again := await ask(self.trainers[:1], "resend", version)).failed:
                return again.kept_from(receivers)
            engines = [receiver for receiver in receivers if receiver in self.engines]
            scorers = [receiver for receiver in receivers if receiver in self.scorers]
            left, staged, swapped = await asyncio.gather(
                ask(self.trainers[:1], "arrived", version),
                self._to_engines(engines, version),
                self._to_scorers(scorers, version),
            )
            return left + staged + swapped

        await self._settle(version, await self._delivery.bring(version, self.receivers, carry))
        self._arrive(version)

    async def _to_engines(self, engines: Sequence[Handle], version: int) -> Outcome:
        staged = await ask(engines, "stage", version, timeout_s=self._wire.timeout_s)
        if not staged.failed and len(engines) == len(self.engines):
            self._arrive(version)
        return staged

    async def _to_scorers(self, scorers: Sequence[Handle], version: int) -> Outcome:
        staged = await ask(scorers, "stage", version, timeout_s=self._wire.timeout_s)
        there = staged.fine(scorers)
        swapped = await ask(there, "swap", version, timeout_s=self._wire.timeout_s)
        self._note(swapped.fine(there), version)
        return staged + swapped

    async def _swap(self, handles: Sequence[Handle], version: int) -> None:
        """Everything is there: what fails now is no matter of transport."""
        self._record(await call_all(handles, "swap", version))
        self._note(handles, version)

    async def _settle(self, version: int, lost: Sequence[tuple[Handle, Exception]]) -> None:
        """Go on without them, or end the run."""
        for receiver, error in lost:
            held = self.membership.of(receiver.name).version
            self.membership.lose(
                receiver.name, f"{receiver.name} did not get version {version} and holds version {held}: {error}"
            )
        names = {receiver.name for receiver, _ in lost}
        left = [engine for engine in self.engines if engine.name not in names]
        essential = names & {scorer.name for scorer in self.scorers}
        if lost and (self.care.on_lost == "end" or essential or not left):
            told = "; ".join(self.membership.of(name).trouble for name in sorted(names))
            raise LostEngine(f"{told} (after up to {self.care.attempts} attempts)") from lost[0][1]
        self.engines = left
        for receiver, _ in lost:
            if self._on_lost is not None:
                await self._on_lost(receiver, self.membership.of(receiver.name).trouble)

    def _note(self, receivers: Sequence[Handle], version: int) -> None:
        for receiver in receivers:
            self.membership.took(receiver.name, version)

    def _arrive(self, version: int) -> None:
        self._arrived = max(self._arrived, version)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _record(self, spans: Iterable[Iterable[Span]]) -> None:
        for part in spans:
            self._observe(part)
