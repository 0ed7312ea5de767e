"""Observers, which hear what happens in a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

from harness.driver.evaluation import Evaluated
from harness.metrics.ledger import DropReason
from harness.metrics.schemas import Restart
from harness.protocols import Span
from harness.workers.training import TrainReport

EngineEvent = Literal["lost", "leaves", "left", "joins", "works"]


class Observer(Protocol):
    """Hears what happens in a job, as it happens. Whatever it hears is progress."""

    def admitted(self, rows: Sequence[int], prompt_tokens: int, at: float) -> None:
        """Rows were admitted. at: seconds of the run's clock."""

    def dropped(self, rows: Sequence[int], reason: DropReason) -> None:
        """Rows were dropped."""

    def doing(self, role: str, what: str) -> None:
        """A role does something else from now on."""

    def engine(self, name: str, what: EngineEvent, why: str = "") -> None:
        """A rollout engine is lost, leaves or joins."""

    def restarted(self, restart: Restart) -> None:
        """Roles died, and are at work again."""

    def spans(self, spans: Iterable[Span]) -> None:
        """Spans have ended."""

    def trained(self, iteration: int, reports: Sequence[TrainReport], of_values: Sequence[TrainReport] = ()) -> None:
        """of_values: the critic's reports, where there is one."""

    def evaluated(self, found: Evaluated) -> None:
        """A version's held-out accuracy."""

    def published(self, version: int) -> Callable[[Mapping[str, float]], None]:
        """Ends an iteration now. What is left to do, which may take milliseconds and is called with the metrics of the
        queue, as `queue_metrics` names them."""
