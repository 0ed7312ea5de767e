"""How far a command is that works for long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text

from harness.driver.progress import beside, steps_bar
from harness.metrics.formatting import duration


@contextmanager
def working(what: str, console: Console) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is done; yields what shows another text instead. In none of them is markup."""
    with beside(console).status(Text(what)) as status:
        yield lambda said: status.update(Text(said))


class StepsBar:
    """Many steps of unknown length: a bar on a terminal, elsewhere a line for each that is done, with the time that is
    left. clock: seconds."""

    def __init__(self, what: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock, self._began = beside(console), clock, clock()
        self._bar = steps_bar(what, self._console)
        self._task = self._bar.add_task("time left is said when a first step is done", total=None)

    def done(self, steps: int, of: int, last: str) -> None:
        """Show that so many steps are done; `last` was the last of them."""
        left = duration((self._clock() - self._began) * (of - steps) / steps) + " left"
        self._bar.update(self._task, completed=steps, total=of, description=f"{left} | done with {last}")
        if not self._console.is_terminal:
            self._console.print(f"[{steps}/{of}] {last}; {left}", highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, traceback)
