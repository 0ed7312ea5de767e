"""The display of a run while it runs."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from harness.checks.job import JobPlan
from harness.driver.listeners import RunListener
from harness.metrics.schemas import Restart

_RECENT = 10  # iterations that the displayed rates are taken over
_SAYS = {
    "virtual": "SIMULATED: every time below comes from a cost model; no model is trained and nothing is rewarded.",
    "real": "TRIAL: processes that should have GPUs of their own share one. They run; their times are of no schedule.",
    "paced": "PACED: real processes, queue and weight transfers around engines that last as long as a cost model says.",
}


def print_banner(plan: JobPlan, console: Console) -> None:
    """Says, before anything else, that what follows was not measured on the hardware it speaks of."""
    console.print(_SAYS[plan.backend], style="bold yellow", highlight=False)
    if plan.why:
        console.print(f"Why: {plan.why}", style="yellow", highlight=False, soft_wrap=True, markup=False)


def beside(console: Console) -> Console:
    """The console that is told how far a command is, of the one that its results go to: `harness.cli.console`."""
    found: Console = getattr(console, "beside", console)
    return found


def steps_bar(what: str, console: Console) -> Progress:
    """A bar of steps on a terminal, beside it what a task says, broken between words where it is narrow."""
    said = TextColumn("{task.description}", table_column=Column(overflow="fold"), markup=False)
    columns = (BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn(), said)
    return Progress(what, *columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def waiting_for(console: Console, what: str, every_s: float = 30.0) -> Iterator[Callable[[str], None]]:
    """A status on a terminal; where there is none (a pipe, CI), a line every `every_s` seconds, so that no long wait is
    silent. What is yielded is told what is waited for from now on."""
    console = beside(console)
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
        return
    over, began = threading.Event(), time.monotonic()

    def say(line: str) -> None:
        nonlocal what
        what = line

    def repeat() -> None:
        while not over.wait(every_s):
            console.print(f"{what} ({time.monotonic() - began:.0f} s)", highlight=False, soft_wrap=True, markup=False)

    thread = threading.Thread(target=repeat, name="waiting", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        over.set()
        thread.join()


class ProgressDisplay(RunListener):
    """A live panel on a terminal; where there is none (a pipe, CI), a plain line every `every_s` seconds."""

    def __init__(self, console: Console, title: str, iterations: int, every_s: float = 10.0) -> None:
        console = beside(console)
        self._console, self._title, self._every_s = console, title, every_s
        self._bar = Progress(
            TextColumn("iteration"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )
        self._iterations = iterations
        self._task = self._bar.add_task("", total=iterations)
        self._recent: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self._worst_lag = 0.0
        self._roles: dict[str, str] = {}
        self._said_at = time.monotonic()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.__enter__()
        else:
            self._console.print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.__exit__(kind, error, traceback)

    def doing(self, role: str, what: str) -> None:
        self._roles[role] = what

    def iteration(self, metrics: Mapping[str, float]) -> None:
        self._recent.append(metrics)
        self._worst_lag = max(self._worst_lag, metrics["staleness/max"])
        self._bar.update(self._task, completed=int(metrics["iteration"]) + 1)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_at >= self._every_s:
            self._said_at = now
            self._console.print(f"iteration {int(metrics['iteration']) + 1}/{self._iterations}  {self._figures()}")

    def restarted(self, restart: Restart) -> None:
        self._tell(restart.line)

    def quiet(self, line: str) -> None:
        self._tell(line)

    def _tell(self, line: str) -> None:
        self._console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)

    def _figures(self) -> str:
        if not self._recent:
            return "waiting for the first iteration"
        seconds = sum(m["time/iteration_s"] for m in self._recent)
        samples = sum(m["throughput/samples_per_s"] * m["time/iteration_s"] for m in self._recent)
        return f"{self._rewards()}{samples / seconds:,.0f} samples/s  worst lag {self._worst_lag:.0f}"

    def _rewards(self) -> str:
        """Nothing where the run is simulated: it has none."""
        if "reward/mean" not in self._recent[0]:
            return ""
        exact = sum(m["reward/exact_match"] for m in self._recent) / len(self._recent)
        reward = sum(m["reward/mean"] for m in self._recent) / len(self._recent)
        return f"exact match {exact:.2f}  reward {reward:.2f}  "

    def _render(self) -> RenderableType:
        roles = Table.grid(padding=(0, 2))
        for role, what in self._roles.items():
            roles.add_row(Text(role, style="cyan"), what)
        return Group(Text(self._title, style="bold"), self._bar, Text(self._figures()), roles)
