"""Brings a version to receivers, again where it fails, and says who did not get it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from harness.protocols import Span
from harness.runtime.handles import Handle, WorkerDied
from harness.weight_sync.errors import TransferError
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.transports import TransferOutcome, WeightTransport

Carry = Callable[[Sequence[Handle], int], Awaitable[TransferOutcome]]
"""One attempt at bringing a version to these receivers. The number is that of the attempt, from 1."""


class RetryingTransfer:
    """Connects the transport whenever others are to get something than are connected, or a transfer failed.

    What may go right the next time (`TransferError`) is tried `attempts` times, by new process groups. Who died, or
    does not answer, is given up at once. Any other error is one of the code, and raised.
    """

    def __init__(
        self,
        trainers: Sequence[Handle],
        transport: WeightTransport,
        *,
        attempts: int,
        observe: Callable[[Iterable[Span]], None],
    ) -> None:
        self.trainers, self.transport, self.attempts = trainers, transport, attempts
        self._observe = observe
        self._plan: TransferPlan | None = None
        self._connected: list[str] | None = None

    def follow(self, plan: TransferPlan) -> None:
        self._plan = plan

    async def connect(self, receivers: Sequence[Handle]) -> None:
        """Bring the transport up, unless it is."""
        names = [receiver.name for receiver in receivers]
        if self._plan is None or self._connected == names:
            return
        self._connected = None
        await self.transport.connect(self.trainers[0], receivers, self._plan)
        self._connected = names

    async def link(self, receivers: Sequence[Handle]) -> list[tuple[Handle, Exception]]:
        """Bring the transport up to those that live; the others. Raises what keeps it from coming up to these."""
        living, dead = list(receivers), list[tuple[Handle, Exception]]()
        for attempt in range(1, self.attempts + 1):
            if (failure := await self._failure(living)) is None:
                break
            gone = [receiver for receiver in living if await receiver.is_dead()]
            if attempt == self.attempts and not gone:
                raise failure
            living = [receiver for receiver in living if receiver not in gone]
            dead += [(receiver, failure) for receiver in gone]
        return dead

    async def bring(self, version: int, receivers: Sequence[Handle], carry: Carry) -> list[tuple[Handle, Exception]]:
        """Those that did not get `version`, each with its last error.

        Raises an ExceptionGroup of what no other attempt would mend: what training ranks died of is among it.
        """
        lost: list[tuple[Handle, Exception]] = []
        missing = list(receivers)
        for attempt in range(1, self.attempts + 1):
            outcome = await self._try(missing, carry, attempt)
            self._raise_what_stays(version, outcome)
            for spans in outcome.spans:
                self._observe(spans)
            if outcome.failed:
                self._connected = None
            failed = [(receiver, error) for receiver in missing if (error := outcome.failed.get(receiver.name))]
            gone = [receiver for receiver, error in failed if await _is_gone(receiver, error)]
            lost += [(receiver, error) for receiver, error in failed if receiver in gone or attempt == self.attempts]
            missing = [receiver for receiver, _ in failed if receiver not in gone]
            if not missing:
                break
        return lost

    async def _try(self, receivers: Sequence[Handle], carry: Carry, attempt: int) -> TransferOutcome:
        failure = await self._failure(receivers)
        if failure is not None:
            return TransferOutcome(failed=dict.fromkeys((receiver.name for receiver in receivers), failure))
        return await carry(receivers, attempt)

    async def _failure(self, receivers: Sequence[Handle]) -> TransferError | None:
        """Bring the transport up; why it could not be, where another attempt may mend that."""
        try:
            await self.connect(receivers)
        except Exception as failure:
            causes = list(_causes(failure))
            if any(not isinstance(cause, TransferError | WorkerDied) for cause in causes):
                raise
            if await self.trainers[0].is_dead():
                raise
            return TransferError(str(causes[0]))
        return None

    def _raise_what_stays(self, version: int, outcome: TransferOutcome) -> None:
        trainers = {trainer.name for trainer in self.trainers}
        stays = [
            error
            for name, error in outcome.failed.items()
            if not isinstance(error, TransferError) and (name in trainers or not _is_absence(error))
        ]
        if stays:
            raise ExceptionGroup(f"version {version} was not brought to the engines", stays)


def _is_absence(error: Exception) -> bool:
    return isinstance(error, WorkerDied | TimeoutError)


async def _is_gone(receiver: Handle, error: Exception) -> bool:
    return _is_absence(error) or await receiver.is_dead()


def _causes(failure: Exception) -> Iterator[Exception]:
    """What a group of errors is made of."""
    if isinstance(failure, ExceptionGroup):
        for part in failure.exceptions:
            yield from _causes(part)
    else:
        yield failure
