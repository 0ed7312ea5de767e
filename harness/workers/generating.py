"""The spans in which an engine generated, and the device that it holds for that."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from harness.protocols import Clock, RolloutEngine, Span
from harness.workers.turns import HeldTurn, Turns


class GenerationSpans:
    """Spans of the engine of this role and name: `open` when it may have begun, `close` when it stopped; `cut` in
    between, so that what was done before is known. An engine that has nothing to do opens none."""

    def __init__(self, engine: RolloutEngine, clock: Clock, role: str, name: str) -> None:
        self._engine, self._clock, self._role, self._name = engine, clock, role, name
        self._spans: list[Span] = []
        self._since: float | None = None

    def open(self) -> None:
        """Begin a span where the engine has samples and none is open."""
        if self._since is None and (self._engine.running or self._engine.waiting):
            self._since = self._clock.now()

    def close(self) -> None:
        """End the open span."""
        self.cut()
        self._since = None

    def cut(self) -> None:
        """End the open span and begin another."""
        if self._since is None:
            return
        start, version, self._since = self._since, self._engine.version, self._clock.now()
        if start < self._since:
            self._spans.append(Span(self._role, self._name, "generate", start, self._since, version, version))

    def add(self, span: Span) -> None:
        """Add a span of something else that it did."""
        self._spans.append(span)

    def take(self) -> list[Span]:
        """Spans since the last call; one that is open is cut."""
        self.cut()
        spans, self._spans = self._spans, []
        return spans


class EngineOnDevice:
    """An engine and its turns on a device: it holds the device from its first sample on until it is idle or paused, or
    for a whole batch, from waking to sleeping.

    rounds: it sleeps whenever it is paused, and holds the device until then; keeps_weights: while it sleeps.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        clock: Clock,
        turns: Turns,
        role: str,
        name: str,
        *,
        rounds: bool = False,
        keeps_weights: bool = True,
    ) -> None:
        self.engine, self._turns, self._role = engine, turns, f"{role}[{name}]"
        self._rounds, self._keeps_weights = rounds, keeps_weights
        self._turn = HeldTurn(turns, f"{self._role}.generate")
        self.spans = GenerationSpans(engine, clock, role, name)
        self.paused = False
        self._awake = False  # it holds the device until it sleeps, idle or not

    @property
    def busy(self) -> int:
        """Samples that the engine has."""
        return self.engine.running + self.engine.waiting

    def open_span(self) -> None:
        """Note that it may have begun to generate; a paused one has not."""
        if not self.paused:
            self.spans.open()

    async def take(self) -> None:
        """Take the device before the engine gets samples, unless it is paused: then `go_on` takes it."""
        if not self.paused:
            await self._turn.take()
            if self.paused:
                await self._turn.give_back()

    async def give_back_if_idle(self) -> None:
        """Give the device back where the engine has no samples."""
        if not self.busy:
            await self.give_back()

    async def give_back(self) -> None:
        """Give the device back, but in the middle of a whole batch."""
        if not self._awake:
            await self._turn.give_back()

    async def take_turn(self) -> None:
        """Take the device, paused or not."""
        await self._turn.take()

    async def begin(self) -> None:
        """Take the device before the engine goes on."""
        await self._turn.take()
        if self._rounds:
            await self._wake()

    async def stopped(self) -> None:
        """The engine was paused: the device is others', also in the middle of a whole batch."""
        self.spans.close()
        if self._rounds and self._awake:
            await self._sleep()
        await self._turn.give_back()

    async def go_on(self) -> None:
        """Resume the engine."""
        await self.engine.resume()
        self.paused = False

    @asynccontextmanager
    async def whole_batch(self) -> AsyncIterator[None]:
        """Holds the device from waking the engine to its sleep. In rounds it may do so again in between; and where it
        is paused already, only from when it goes on."""
        try:
            if not self.paused:
                await self._turn.take()
                await self._wake()
            yield
            if self._awake:
                await self._sleep()
        finally:
            self._awake = False
            await self._turn.give_back()

    async def _wake(self) -> None:
        self._awake = True
        await self.engine.wake()

    async def _sleep(self) -> None:
        await self.engine.sleep(keep_weights=self._keeps_weights)
        self._awake = False

    def turn(self, what: str) -> AbstractAsyncContextManager[None]:
        """A turn on the device for something besides generating; none where it is held."""
        return nullcontext() if self._turn.held else self._turns.turn(f"{self._role}.{what}")
