"""The weights of a job: which version each receiver holds, what may happen at the same time, what is tried again."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.protocols import EngineDied, Span, TransferError
from harness.runtime.runtime import Handle, Waits, WorkerDied, ask_all, death_in, parts_of, retrieved
from harness.weight_sync.endpoints import EngineWorker
from harness.weight_sync.membership import Fleet, LostEngine
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.simulated import SimulatedTransport
from harness.weight_sync.transports import (
    GroupTransport,
    LocalTransport,
    Receiver,
    Sender,
    TransferOutcome,
    ask_each,
    stage,
    swap,
)

WeightTransport = GroupTransport | LocalTransport | SimulatedTransport

Observe = Callable[[Iterable[Span]], None]
"""Called with the spans of each worker that took part in a transfer."""
Attempt = Callable[[Sequence[Receiver], int], Awaitable[TransferOutcome]]
"""One attempt at bringing a version to these receivers. The number is that of the attempt, from 1."""
Failures = Sequence[tuple[Receiver, Exception]]
"""Receivers that did not get a version, each with its last error."""


@dataclass(frozen=True)
class RetryPolicy:
    """attempts: how often a transfer is tried, besides those that a receiver dies over; verify: check every tensor
    against its digest; delta: send only what changed since, and all of it in another attempt."""

    attempts: int = 3
    verify: bool = False
    delta: bool = False


class NotBrought(RuntimeError):
    """An engine that was started again has no weights: it died before, or every attempt at a transfer failed. The
    message names it."""


class Coordinator:
    """The weights of one job.

    trainers: the training ranks in order; fleet: the engines, which take a version when the schedule says so; scorers:
    they take each as soon as it is there. Engines come and go between transfers. At most one transfer is under way in
    the background. Where one fails for good, its error is raised by every call from then on, and by `finish`: the run
    ends.

    Fifteen attributes: nine are the parts that it brings together.
    """

    def __init__(
        self,
        trainers: Sequence[Sender],
        *,
        fleet: Fleet[EngineWorker],
        scorers: Sequence[Receiver] = (),
        transport: WeightTransport,
        bucket_bytes: int,
        observe: Observe,
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
        self._one_at_a_time = asyncio.Lock()  # of what the training ranks take part in
        self._arrived = 0
        self._progress = asyncio.Event()  # a version arrived, or a transfer ended; then there is a new one
        self._transfer: asyncio.Task[None] | None = None

    @property
    def receivers(self) -> list[Receiver]:
        """Engines that take part in the next transfer, and scorers."""
        return [*self.fleet.receivers, *self.scorers]

    @property
    def versions(self) -> dict[str, int]:
        """The version that each engine holds, by name."""
        return self.membership.versions

    @property
    def arrived(self) -> int:
        """The newest version that is in the host memory of every engine. Until the next one is, none of them drops it:
        a call that is made at once still finds it."""
        return self._arrived

    async def connect(self) -> None:
        """Compute the plan and connect the transport on all sides."""
        plan = await self.trainers[0].role.plan(self._bucket_bytes, self.retry.verify, self.retry.delta)
        self._retrying.plan = plan
        await self._retrying.connect(self.receivers)
        self.plan = plan

    async def distribute(self, version: int) -> None:
        """Bring the trained weights to every receiver as `version`.

        What a receiver loaded is its version from then on. Raises LostEngine, or what no other attempt would mend.
        """

        async def attempt(receivers: Sequence[Receiver], number: int) -> TransferOutcome:
            outcome = await self._transport.transfer(self.trainers, receivers, version)
            self._loaded(outcome.succeeded(receivers), version)
            return outcome

        async with self._one_at_a_time:
            await self.finish()
            await self.fleet.begin_transfer()
            engines = self.fleet.receivers
            failures = await self._retrying.run(version, [*engines, *self.scorers], attempt)
            await self._go_on_without(version, failures)
            self.fleet.received(engines, version)
            self._arrived = version

    async def ended(self) -> None:
        """Wait until no transfer is under way. Until then an engine that died over one must not be started again: it
        would be asked for the rest, and knows nothing of what came before."""
        async with self._one_at_a_time:
            await self.finish()

    async def bring(self, engine: Handle[EngineWorker], settled: Callable[[], Awaitable[int]]) -> int:
        """The newest weights to this engine alone, which was started again and is idle; their version.

        They are those that training has come to, between two batches, so they may be of a version that no other engine
        has yet. settled: waits until the trainer's weights are of a version, and says of which. Raises NotBrought
        where this engine could not get them, or what ends a run.
        """
        async with self._one_at_a_time:
            await self.finish()
            self._retrying.forget()
            version, sent = -1, await settled()
            while version != sent:  # a step was made meanwhile: nobody knows what it got
                version = sent
                await self._bring(engine, version)
                sent = await settled()
            return version

    async def _bring(self, engine: Handle[EngineWorker], version: int) -> None:
        async def attempt(receivers: Sequence[Receiver], number: int) -> TransferOutcome:
            return await self._transport.transfer(self.trainers, receivers, version)

        for _, error in await self._retrying.run(version, [engine], attempt):
            raise NotBrought(f"{engine.name} did not get version {version}: {self._tried(error)}") from error

    async def start_transfer(self, version: int) -> None:
        """Wait for the previous transfer, copy the trained weights to the trainer's host memory, and let them travel.

        Returns when the copy is complete: then the trainer may change its weights.
        """
        async with self._one_at_a_time:
            await self.finish()
            await self.fleet.begin_transfer()
            engines = self.fleet.receivers
            await self._go_on_without(version, await self._retrying.connect_living([*engines, *self.scorers]))
            left = self.fleet.receivers
            engines = [engine for engine in engines if engine in left]
            # The copy travels as soon as it is there.
            for spans in await ask_all(self.trainers, lambda actor: actor.send(version)):
                self._observe(spans)
            self._transfer = asyncio.create_task(self._transfer_to_hosts(version, engines))
            self._transfer.add_done_callback(retrieved)  # a run may end before anybody waits for it
            self._transfer.add_done_callback(lambda _: self._wake())

    async def wait_arrived(self, version: int) -> None:
        """Wait until `version`, whose transfer may not have started yet, is in the host memory of every engine."""
        with self.waits("wait_arrived", f"version {version} to be sent and to arrive"):
            while self._arrived < version and not self._failed:
                await self._progress.wait()
        if self._failed:
            await self.finish()

    async def swap(self, handles: Sequence[Receiver], version: int) -> None:
        """Let these receivers load `version` from their host memory, once it has arrived there. One that was started
        again since may hold a newer one, and keeps it; one that was away as this one travelled has none to load."""
        await self.wait_arrived(version)
        receivers, members = self.fleet.receivers, self.membership
        handles = [
            handle
            for handle in handles
            if handle in receivers and (member := members.of(handle.name)).version < version >= member.due
        ]
        swapped = await swap(handles, version)
        for spans in swapped.spans:
            self._observe(spans)
        self._loaded(swapped.succeeded(handles), version)
        deaths = {name: death for name, error in swapped.failed.items() if (death := death_in(error))}
        if len(deaths) < len(swapped.failed):  # nothing travels here: another attempt would not mend it
            raise ExceptionGroup(f"version {version} was not loaded", list(swapped.failed.values()))
        await self._lose(version, deaths)

    async def load_beside(self, engines: Sequence[Receiver], version: int) -> None:
        """Let engines that no transfer reaches take the trained weights, `version`, from the ranks beside them."""
        async with self._one_at_a_time:
            loaded = await LocalTransport().transfer([], engines, version)
        for spans in loaded.spans:
            self._observe(spans)
        if loaded.failed:
            raise ExceptionGroup(f"version {version} was not loaded", list(loaded.failed.values()))

    async def finish(self) -> None:
        """Wait for the transfer under way, if any; raises its error, also when that was raised before."""
        if self._transfer is not None:
            with self.waits("finish", f"the transfer after version {self._arrived} to end"):
                await asyncio.shield(self._transfer)

    async def abort(self) -> None:
        """End every wait of one end of a transfer for another, one of which does not answer."""
        await self._transport.abort()

    async def waiting(self) -> list[str]:
        """Lines on what waits here."""
        return self.waits.lines()

    @property
    def _failed(self) -> bool:
        """Whether the last transfer ended, and not well."""
        transfer = self._transfer
        return transfer is not None and transfer.done() and (transfer.cancelled() or transfer.exception() is not None)

    async def _transfer_to_hosts(self, version: int, engines: Sequence[Receiver]) -> None:
        """Consumes the trainer's host copy, produces the receivers'. Waits for all ends of the transport, which give up
        on each other by its timeout. A worker that computes answers late, and must not keep engines from their weights.
        """

        abort = self._transport.abort

        async def attempt(receivers: Sequence[Receiver], number: int) -> TransferOutcome:
            senders = self._transport.sending(self.trainers)
            if number > 1:
                again = await ask_each(senders, lambda actor: actor.resend(version), f"resend version {version}")
                if again.failed:
                    return again.skipping(receivers)
            scorers = [receiver for receiver in receivers if receiver in self.scorers]
            missing = [receiver for receiver in receivers if receiver not in scorers]
            sent, staged, swapped = await asyncio.gather(
                ask_each(senders, lambda actor: actor.wait_arrived(version), f"send version {version}", on_death=abort),
                self._to_engines(missing, version, all_of_them=len(missing) == len(engines)),
                self._to_scorers(scorers, version),
            )
            return sent + staged + swapped

        failures = await self._retrying.run(version, [*engines, *self.scorers], attempt)
        await self._go_on_without(version, failures)
        self._received(engines, version)

    async def _to_engines(self, engines: Sequence[Receiver], version: int, *, all_of_them: bool) -> TransferOutcome:
        staged = await self._stage(engines, version)
        if all_of_them and not staged.failed:
            self._received(engines, version)
        return staged

    async def _to_scorers(self, scorers: Sequence[Receiver], version: int) -> TransferOutcome:
        staged = await self._stage(scorers, version)
        there = staged.succeeded(scorers)
        swapped = await swap(there, version, self._transport.timeout_s)
        self._loaded(swapped.succeeded(there), version)
        return staged + swapped

    async def _stage(self, receivers: Sequence[Receiver], version: int) -> TransferOutcome:
        return await stage(receivers, version, self._transport.timeout_s, self._transport.abort)

    async def _go_on_without(self, version: int, failures: Failures) -> None:
        """Give up the receivers that failed, or end the run."""
        errors = {receiver.name: error for receiver, error in failures}
        if any(receiver in self.scorers for receiver, _ in failures):
            raise LostEngine("; ".join(self._reasons(version, errors).values())) from failures[0][1]
        if failures:
            await self._lose(version, errors)

    async def _lose(self, version: int, errors: Mapping[str, Exception]) -> None:
        await self.fleet.lose(self._reasons(version, errors))

    def _reasons(self, version: int, errors: Mapping[str, Exception]) -> dict[str, str]:
        """Why each of these did not get `version`."""
        reasons = {}
        for name, error in errors.items():
            held = self.membership.of(name).version
            reasons[name] = f"{name} did not get version {version} and holds version {held}: {self._tried(error)}"
        return reasons

    def _tried(self, error: Exception) -> str:
        """The message of an error, with the number of attempts."""
        return f"{error} (after {self.retry.attempts} attempts)" if isinstance(error, TransferError) else str(error)

    def _loaded(self, receivers: Sequence[Receiver], version: int) -> None:
        for receiver in receivers:
            self.membership.set_version(receiver.name, version)

    def _received(self, engines: Sequence[Receiver], version: int) -> None:
        """Note that all engines that are left have the version in host memory."""
        self.fleet.received(engines, version)
        self._arrived = max(self._arrived, version)
        self._wake()

    def _wake(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


class RetryingTransfer:
    """Runs transfers, and connects the transport whenever the receivers changed or a transfer failed.

    What may succeed the next time (`TransferError`) is tried `attempts` times, over new process groups. A receiver that
    died, or does not answer, is given up at once; what failed with it for the others is no attempt of theirs. Any other
    error is a bug, and raised.
    """

    def __init__(
        self, trainers: Sequence[Sender], transport: WeightTransport, *, attempts: int, observe: Observe
    ) -> None:
        self.trainers, self.transport, self.attempts = trainers, transport, attempts
        self.plan: TransferPlan | None = None
        self._observe = observe
        self._connected: list[str] | None = None

    def forget(self) -> None:
        """Forget the connection: a receiver is another process than before, and has to be connected anew."""
        self._connected = None

    async def connect(self, receivers: Sequence[Receiver]) -> None:
        """Connect the transport to these receivers, unless it is."""
        names = [receiver.name for receiver in receivers]
        if self.plan is None or self._connected == names:
            return
        self._connected = None
        await self.transport.connect(self.trainers, receivers, self.plan)
        self._connected = names

    async def connect_living(self, receivers: Sequence[Receiver]) -> Failures:
        """Connect those that live; returns the others. Raises what keeps the living from connecting."""
        living, dead, left = list(receivers), list[tuple[Receiver, Exception]](), self.attempts
        while (failure := await self._connection_failure(living)) is not None:
            gone = [receiver for receiver in living if await receiver.death()]
            if not gone and not (left := left - 1):
                raise failure
            living = [receiver for receiver in living if receiver not in gone]
            dead += [(receiver, await _cause(receiver, failure)) for receiver in gone]
        return dead

    async def run(self, version: int, receivers: Sequence[Receiver], attempt: Attempt) -> Failures:
        """Make attempts until all have `version` or nothing is left to try; returns those that did not get it.

        Raises an ExceptionGroup of what no other attempt would mend, the death of a training rank included.
        """
        failures, missing = list[tuple[Receiver, Exception]](), list(receivers)
        number, left = 0, self.attempts
        while missing:
            number += 1
            if (failure := await self._connection_failure(missing)) is not None:
                outcome = TransferOutcome(failed=dict.fromkeys((receiver.name for receiver in missing), failure))
            else:
                outcome = await attempt(missing, number)
            self._raise_permanent(version, outcome)
            for spans in outcome.spans:
                self._observe(spans)
            if outcome.failed:
                self._connected = None
            errors = [(receiver, error) for receiver in missing if (error := outcome.failed.get(receiver.name))]
            failed = [(receiver, await _cause(receiver, error)) for receiver, error in errors]
            gone = [receiver for receiver, error in failed if _is_absence(error)]
            if not gone:
                left -= 1
            failures += [(receiver, error) for receiver, error in failed if receiver in gone or not left]
            missing = [receiver for receiver, _ in failed if receiver not in gone] if left else []
        return failures

    async def _connection_failure(self, receivers: Sequence[Receiver]) -> TransferError | None:
        """Connect; returns why that failed, where another attempt may mend it."""
        try:
            await self.connect(receivers)
        except Exception as failure:
            causes = list(parts_of(failure))
            if any(not isinstance(cause, TransferError | WorkerDied) for cause in causes):
                raise
            if any(await asyncio.gather(*(trainer.death() for trainer in self.transport.sending(self.trainers)))):
                raise
            return TransferError(str(causes[0]))
        return None

    def _raise_permanent(self, version: int, outcome: TransferOutcome) -> None:
        trainers = {trainer.name for trainer in self.trainers}
        hard = {name: error for name, error in outcome.failed.items() if not isinstance(error, TransferError)}
        if any(name in trainers or not _is_absence(error) for name, error in hard.items()):
            # All of them: an error of one may be how it met the death of another.
            raise ExceptionGroup(f"version {version} was not brought to the engines", list(hard.values()))


async def _cause(receiver: Receiver, error: Exception) -> Exception:
    """How it died, where a connection broke for that."""
    if _is_absence(error) or (how := await receiver.death()) is None:
        return error
    return WorkerDied(f"{receiver.name} died: {how}")


def _is_absence(error: Exception) -> bool:
    return isinstance(error, WorkerDied | EngineDied | TimeoutError)
