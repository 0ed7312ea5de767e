"""Listeners, which hear what is known of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from harness.metrics.schemas import Restart

if TYPE_CHECKING:
    from harness.driver.evaluation import Evaluated


class RunListener:
    """Hears what is known of a run: its folder, the mirror, a display. What a listener does not override is no news to
    it."""

    def begun(self) -> None:
        """Hear that the schedule begins."""

    def doing(self, role: str, what: str) -> None:
        """Hear what a role is doing from now on."""

    def iteration(self, metrics: Mapping[str, float]) -> None:
        """Hear the metrics of an iteration that was closed."""

    def evaluated(self, found: Evaluated) -> None:
        """Hear a version's held-out accuracy."""

    def restarted(self, restart: Restart) -> None:
        """Hear that roles died, and are at work again."""

    def quiet(self, line: str) -> None:
        """Hear that nothing has happened for longer than ever, and who waits for what."""

    def served(self, url: str, token: str) -> AbstractContextManager[None]:
        """Wrap the time in which the engines are served at this address, to who has the token."""
        return nullcontext()


class IterationListener(RunListener):
    """Calls a function with the metrics of every iteration."""

    def __init__(self, hear: Callable[[Mapping[str, float]], None]) -> None:
        self._hear = hear

    def iteration(self, metrics: Mapping[str, float]) -> None:
        self._hear(metrics)
