"""When an engine generated, as spans."""

from __future__ import annotations

from harness.protocols import Clock, RolloutEngine, Span


class GenerationSpans:
    """Of the engine of this name: `open` when it may have begun, `close` when it stopped; `cut` in between, so that
    what was done before is known. An engine that has nothing to do opens none."""

    def __init__(self, engine: RolloutEngine, clock: Clock, name: str) -> None:
        self._engine, self._clock, self._name = engine, clock, name
        self._spans: list[Span] = []
        self._since: float | None = None

    def open(self) -> None:
        if self._since is None and (self._engine.running or self._engine.waiting):
            self._since = self._clock.now()

    def close(self) -> None:
        self.cut()
        self._since = None

    def cut(self) -> None:
        if self._since is None:
            return
        start, version, self._since = self._since, self._engine.version, self._clock.now()
        if start < self._since:
            self._spans.append(Span("rollout", self._name, "generate", start, self._since, version, version))

    def add(self, span: Span) -> None:
        """Of something else that it did."""
        self._spans.append(span)

    def take(self) -> list[Span]:
        """Those since the last call; one that is open is cut."""
        self.cut()
        spans, self._spans = self._spans, []
        return spans
