"""The weights of a job: which version each receiver holds, and what may happen at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.protocols import Span
from harness.runtime.handles import Handle, call_all, death_in
from harness.runtime.waits import Waits
from harness.weight_sync.delivery import RetryingTransfer
from harness.weight_sync.errors import TransferError
from harness.weight_sync.fleet import Fleet, LostEngine
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.transports import TransferOutcome, WeightTransport, ask

__all__ = ["RetryPolicy", "Coordinator", "Fleet", "LostEngine", "WeightTransport"]


@dataclass(frozen=True)
class RetryPolicy:
    """What is done so that weights arrive. attempts: how often a transfer is tried; verify: hold every tensor against
    its digest."""

    attempts: int = 3
    verify: bool = False


class Coordinator:
    """The weights of one job.

    trainers: the training ranks in order; fleet: the engines, which take a version when the schedule says so; scorers:
    they take each as soon as it is there. Engines come and go between transfers. At most one staged transfer is under
    way. Where one fails for good, its error is raised by every call from then on, and by `finish`: the run ends.
    """

    def __init__(
        self,
        trainers: Sequence[Handle],
        *,
        fleet: Fleet,
        scorers: Sequence[Handle] = (),
        transport: WeightTransport,
        bucket_bytes: int,
        observe: Callable[[Iterable[Span]], None],
        retry: RetryPolicy | None = None,
    ) -> None:
        self.trainers, self.fleet, self.scorers = list(trainers), fleet, list(scorers)
        self.membership = fleet.membership
        for scorer in scorers:
            self.membership.join(scorer.name, kind="scorer")
        self.plan: TransferPlan | None = None
        self.retry = retry or RetryPolicy()
        self.waits = Waits("weights")
        self._transport, self._bucket_bytes, self._observe = transport, bucket_bytes, observe
        self._retrying = RetryingTransfer(trainers, transport, attempts=self.retry.attempts, observe=observe)
        self._arrived = 0
        self._news = asyncio.Event()  # a version arrived, or a transfer ended; then there is a new one
        self._transfer: asyncio.Task[None] | None = None

    @property
    def receivers(self) -> list[Handle]:
        return [*self.fleet.receivers, *self.scorers]

    @property
    def versions(self) -> dict[str, int]:
        """What each receiver holds, by name."""
        return self.membership.versions

    async def connect(self) -> None:
        """Compute the plan and bring the transport up on all sides."""
        source, followers = self.trainers[0], self.trainers[1:]
        plan: TransferPlan = await source.call("plan", self._bucket_bytes, self.retry.verify)
        await call_all(followers, "gather_only", plan)
        self._retrying.follow(plan)
        await self._retrying.connect(self.receivers)
        self.plan = plan

    async def publish(self, version: int) -> None:
        """Bring the trained weights to every receiver as `version`.

        What a receiver took is its version from then on. Raises LostEngine, or what no other attempt would mend.
        """
        await self.finish()
        await self.fleet.turn()
        taking_part = self.fleet.receivers

        async def carry(receivers: Sequence[Handle], attempt: int) -> TransferOutcome:
            outcome = await self._transport.publish(self.trainers, receivers, version)
            self._note(outcome.fine(receivers), version)
            return outcome

        await self._settle(version, await self._retrying.bring(version, [*taking_part, *self.scorers], carry))
        self.fleet.enter(taking_part)
        self._arrived = version

    async def start_transfer(self, version: int) -> None:
        """Wait for the transfer before, copy the trained weights to the trainer's host memory, and let them travel.

        Returns when the copy is complete: then the trainer may change its weights.
        """
        await self.finish()
        await self.fleet.turn()
        taking_part = self.fleet.receivers
        await self._settle(version, await self._retrying.link([*taking_part, *self.scorers]))
        left = self.fleet.receivers
        taking_part = [engine for engine in taking_part if engine in left]
        # The copy travels as soon as it is there.
        self._record(await call_all(self.trainers, "publish", version))
        self._transfer = asyncio.create_task(self._carry(version, taking_part))
        self._transfer.add_done_callback(lambda _: self._tell())

    async def wait_arrived(self, version: int) -> None:
        """Wait until `version`, whose transfer may not have started yet, is in the host memory of every engine."""
        with self.waits("wait_arrived", f"version {version} to be sent and to arrive"):
            while self._arrived < version and not self._failed:
                await self._news.wait()
        if self._failed:
            await self.finish()

    async def swap(self, handles: Sequence[Handle], version: int) -> None:
        """These receivers load `version` from their host memory, once it has arrived there."""
        await self.wait_arrived(version)
        await self._swap(handles, version)

    async def finish(self) -> None:
        """Wait for the transfer under way, if any; raises its error, also when that was raised before."""
        if self._transfer is not None:
            with self.waits("finish", f"the transfer after version {self._arrived} to end"):
                await asyncio.shield(self._transfer)

    async def waiting(self) -> list[str]:
        """What waits here, a line each."""
        return self.waits.lines()

    @property
    def _failed(self) -> bool:
        """Whether the last transfer ended, and not well."""
        transfer = self._transfer
        return transfer is not None and transfer.done() and (transfer.cancelled() or transfer.exception() is not None)

    async def _carry(self, version: int, taking_part: Sequence[Handle]) -> None:
        """Consumes the trainer's host copy, produces the receivers'. Waits for all ends of the transport, which
        give up on each other by its timeout. A worker that computes answers late, and must not keep engines from their
        weights."""

        async def carry(receivers: Sequence[Handle], attempt: int) -> TransferOutcome:
            if attempt > 1 and (again := await ask(self.trainers[:1], "resend", version)).failed:
                return again.kept_from(receivers)
            scorers = [receiver for receiver in receivers if receiver in self.scorers]
            engines = [receiver for receiver in receivers if receiver not in scorers]
            left, staged, swapped = await asyncio.gather(
                ask(self.trainers[:1], "wait_arrived", version, on_death=self._transport.abort),
                self._to_engines(engines, version, len(taking_part)),
                self._to_scorers(scorers, version),
            )
            return left + staged + swapped

        await self._settle(version, await self._retrying.bring(version, [*taking_part, *self.scorers], carry))
        self.fleet.enter(taking_part)
        self._arrive(version)

    async def _to_engines(self, engines: Sequence[Handle], version: int, wanted: int) -> TransferOutcome:
        staged = await self._stage(engines, version)
        if not staged.failed and len(engines) == wanted:
            self.fleet.enter(engines)
            self._arrive(version)
        return staged

    async def _to_scorers(self, scorers: Sequence[Handle], version: int) -> TransferOutcome:
        staged = await self._stage(scorers, version)
        there = staged.fine(scorers)
        swapped = await ask(there, "swap", version, timeout_s=self._transport.timeout_s)
        self._note(swapped.fine(there), version)
        return staged + swapped

    async def _stage(self, receivers: Sequence[Handle], version: int) -> TransferOutcome:
        transport = self._transport
        return await ask(receivers, "stage", version, timeout_s=transport.timeout_s, on_death=transport.abort)

    async def _swap(self, handles: Sequence[Handle], version: int) -> None:
        """Everything is there: what fails now, but for who dies, is no matter of transport."""
        receivers = self.fleet.receivers
        swapped = await ask([handle for handle in handles if handle in receivers], "swap", version)
        self._record(swapped.spans)
        self._note(swapped.fine(handles), version)
        deaths = {name: death for name, error in swapped.failed.items() if (death := death_in(error))}
        if len(deaths) < len(swapped.failed):
            raise ExceptionGroup(f"version {version} was not loaded", list(swapped.failed.values()))
        await self.fleet.lose({name: self._missed(name, version, death) for name, death in deaths.items()})

    async def _settle(self, version: int, lost: Sequence[tuple[Handle, Exception]]) -> None:
        """Go on without them, or end the run."""
        if not lost:
            return
        reasons = {receiver.name: self._missed(receiver.name, version, error) for receiver, error in lost}
        if any(receiver in self.scorers for receiver, _ in lost):
            raise LostEngine("; ".join(reasons.values())) from lost[0][1]
        await self.fleet.lose(reasons)

    def _missed(self, name: str, version: int, error: Exception) -> str:
        held = self.membership.of(name).version
        tried = f" (after {self.retry.attempts} attempts)" if isinstance(error, TransferError) else ""
        return f"{name} did not get version {version} and holds version {held}: {error}{tried}"

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
