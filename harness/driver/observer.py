"""Observers, which hear what happens in a job, and listeners, which hear what is known of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from harness.metrics.ledger import DropReason
from harness.metrics.schemas import Restart
from harness.protocols import Span
from harness.tasks import Problem

if TYPE_CHECKING:
    from harness.driver.evaluation import Evaluated
    from harness.workers.recording import Recorded, TrainedIteration
    from harness.workers.training import TrainReport

EngineEvent = Literal["lost", "leaves", "left", "joins", "works"]


@dataclass(frozen=True)
class EndedIteration:
    """trained: what is to be recorded of it; close: is called with what was, and with the metrics of the queue, as
    `queue_metrics` names them."""

    trained: TrainedIteration
    close: Callable[[Recorded, Mapping[str, float]], None]


class Observer(Protocol):
    """Hears what happens in a job, as it happens. Whatever it hears is progress."""

    group_size: int

    def admitted(self, rows: Sequence[int], problem: Problem, at: float) -> None:
        """The rows of a group were admitted. at: seconds of the run's clock."""

    def dropped(self, rows: Sequence[int], reason: DropReason, rewards: Sequence[float | None] = ()) -> None:
        """Rows were dropped. rewards: of each, where they are known."""

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

    def evaluated(self, found: Evaluated, responses: Mapping[str, Any]) -> None:
        """A version's held-out accuracy. responses: as columns of eval_responses.parquet."""

    def published(self, version: int) -> EndedIteration:
        """Ends an iteration now, which is then to be recorded."""


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
