"""What many runs look like while they run: a bar on a terminal, and a line for every run that ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RunsDisplay:
    """Drawn in the caller's thread only: processes are forked beside it."""

    def __init__(self, console: Console, *, total: int, done: int) -> None:
        self._console, self._total, self._ended = console, total, done
        self._bar = Progress(
            TextColumn("runs"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> RunsDisplay:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, running: Sequence[str], left: str) -> None:
        """What runs now, and how long all that is left will take."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=f"{left} left | {', '.join(running)}")
            self._bar.refresh()

    def ended(self, said: str, left: str, *, well: bool) -> None:
        """A run is over."""
        self._ended += 1
        self._bar.update(self._task, completed=self._ended)
        more = f"; {left} left" if self._ended < self._total else ""
        line = f"[{self._ended}/{self._total}] {said}{more}"
        self._console.print(line, style="" if well else "red", highlight=False, markup=False, soft_wrap=True)
