"""Many runs, one after another: what is done is left, what fails is named and stops nothing else."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from harness.comparison.running.cells import JobCell
from harness.comparison.running.child import Child
from harness.comparison.running.display import RunsDisplay
from harness.comparison.running.estimate import Estimate, told
from harness.metrics.run_files import is_done

LIMIT_S = 24 * 3600.0
"""Longest run. Generous: a run that stalls ends itself (cluster.stall_timeout_s and its neighbours)."""

_LOOK_S = 0.2  # between two looks at the processes

Planned = tuple[JobCell, int]
"""A run to be: its cell and its seed."""

Command = Callable[[JobCell, int], Sequence[str]]


@dataclass(frozen=True)
class Failure:
    """A run that did not end well. words: the last lines of its log."""

    label: str
    seed: int
    how: str
    words: str
    log: Path


@dataclass(frozen=True)
class Outcome:
    """What became of the runs. done: label and seed, those that were done before included."""

    done: tuple[tuple[str, int], ...]
    failed: tuple[Failure, ...]


def bench_command(cell: JobCell, seed: int) -> list[str]:
    """One seed of a cell, as a process."""
    return [sys.executable, "-m", "harness", "bench", *cell.settings, f"seeds=[{seed}]"]


@dataclass(frozen=True)
class Runs:
    """Every cell with every seed. force: also those that are done."""

    cells: tuple[JobCell, ...]
    seeds: tuple[int, ...]
    results: Path
    force: bool = False

    @property
    def all(self) -> list[Planned]:
        """The first seed of every cell, then the second: an early end leaves a whole comparison of fewer seeds."""
        return [(cell, seed) for seed in self.seeds for cell in self.cells]

    def to_do(self) -> list[Planned]:
        """Those that are not done yet, or are to be done again."""
        return [(cell, seed) for cell, seed in self.all if self.force or not is_done(cell.folder(seed, self.results))]

    @property
    def at_once(self) -> int:
        """Runs side by side: one where time is measured, as many as there are cores where it is reckoned."""
        reckoned = all(cell.plan.backend == "virtual" for cell in self.cells)
        return len(os.sched_getaffinity(0)) if reckoned else 1

    def estimate(self) -> Estimate:
        return Estimate(self.cells, self.seeds, self.results)


def run_cells(runs: Runs, console: Console, command: Command = bench_command) -> Outcome:
    """Run what is not done yet, each run in a process of its own, and none twice.

    A run that fails, or lasts longer than LIMIT_S, is among the failed. SIGINT and SIGTERM raise KeyboardInterrupt once
    the runs under way have ended.
    """
    campaign = _Campaign(runs, command)
    with _interruptible(), RunsDisplay(console, total=len(runs.all), done=len(campaign.done)) as display:
        try:
            while campaign.todo or campaign.running:
                campaign.step(display)
                time.sleep(_LOOK_S)
        finally:
            for run in campaign.running:
                run.child.end()
    return Outcome(tuple(campaign.done), tuple(campaign.failed))


@dataclass(frozen=True)
class _Running:
    cell: JobCell
    seed: int
    child: Child


class _Campaign:
    def __init__(self, runs: Runs, command: Command) -> None:
        self._runs, self._command, self._estimate = runs, command, runs.estimate()
        self.todo = deque(runs.to_do())
        self.running: list[_Running] = []
        self.failed: list[Failure] = []
        self.done = [(cell.label, seed) for cell, seed in runs.all if (cell, seed) not in self.todo]

    def step(self, display: RunsDisplay) -> None:
        """Start what may start, and take note of what has ended."""
        while self.todo and len(self.running) < self._runs.at_once:
            self.running.append(self._start(*self.todo.popleft()))
        for run in list(self.running):
            how = _ended(run, self._runs.results)
            if how is not None:
                self.running.remove(run)
                self._note(run, how)
                said = f"{run.cell.label} seed {run.seed}: {how or 'done'} in {run.child.seconds:.0f} s"
                display.ended(said, self._left(), well=not how)
        display.show(
            [f"{run.cell.label} seed {run.seed}, {run.child.seconds:.0f} s" for run in self.running], self._left()
        )

    def _start(self, cell: JobCell, seed: int) -> _Running:
        folder = cell.folder(seed, self._runs.results)
        log = folder.with_name(f"{folder.name}.log")
        environment = {"CADENCE_RESULTS": str(self._runs.results)}
        return _Running(cell, seed, Child(f"{cell.label} seed {seed}", self._told(cell, seed), log, environment))

    def _told(self, cell: JobCell, seed: int) -> list[str]:
        return [*self._command(cell, seed), *(["force=true"] if self._runs.force else [])]

    def _note(self, run: _Running, how: str) -> None:
        if how:
            self.failed.append(Failure(run.cell.label, run.seed, how, run.child.last_words(), run.child.log))
        else:
            self.done.append((run.cell.label, run.seed))
            self._estimate.took(run.cell, run.child.seconds)

    def _left(self) -> str:
        running = [(run.cell, run.child.seconds) for run in self.running]
        return told(self._estimate.left([cell for cell, _ in self.todo], running, self._runs.at_once))


def _ended(run: _Running, results: Path) -> str | None:
    """How it failed, empty where it did not; None while it runs."""
    code = run.child.ended()
    if code is None and run.child.seconds > LIMIT_S:
        run.child.end()
        return f"FAILED, not done after {LIMIT_S / 3600:g} h"
    if code is None:
        return None
    if code:
        run.child.clear()
        return f"FAILED with exit code {code}"
    return "" if is_done(run.cell.folder(run.seed, results)) else "FAILED, ended without DONE"


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a campaign as Ctrl-C does, also where a shell in the background has it ignore the latter: what it
    starts would inherit that, and could not be interrupted."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
