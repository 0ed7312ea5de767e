"""How far a command is that takes many steps of unknown length."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.metrics.formatting import duration


class StepsBar:
    """A bar on a terminal, elsewhere a line for each step that is done, with the time that is left. clock: seconds."""

    def __init__(self, what: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock, self._began = console, clock, clock()
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(what, *columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("time left is said when a first step is done", total=None)

    def done(self, steps: int, of: int, last: str) -> None:
        """Show that so many steps are done; `last` was the last of them."""
        left = duration((self._clock() - self._began) * (of - steps) / steps) + " left"
        self._bar.update(self._task, completed=steps, total=of, description=f"{left} | done with {last}")
        if not self._console.is_terminal:
            self._console.print(f"[{steps}/{of}] {last}; {left}", highlight=False, markup=False)

    def __enter__(self) -> StepsBar:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, traceback)
