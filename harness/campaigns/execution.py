"""Many runs, one after another: what is done is left, what fails is reported and stops nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from types import FrameType

from rich.console import Console

from harness.campaigns.cells import ResolvedCell
from harness.campaigns.process import RunProcess
from harness.config.compose import cell_prefix
from harness.config.machine import Machine
from harness.driver.progress import beside, print_banner, steps_bar
from harness.metrics.done import is_done, read_done
from harness.metrics.formatting import duration, say
from harness.metrics.run_files import load_manifest, load_metrics
from harness.metrics.schemas import DamagedFile
from harness.metrics.tables import Table

LIMIT_S = 24 * 3600.0
"""Longest run. Generous: a run that stalls ends itself (cluster.stall_timeout_s and its neighbours)."""

_POLL_S = 0.2

START_S = 4.0
"""Seconds that a run takes, roughly, besides its iterations: processes that start, plots. Scaling leaves it out."""

PendingRun = tuple[ResolvedCell, int]  # a cell and a seed
StartRun = Callable[[str, Sequence[str], Path, Path], RunProcess]
"""`bench` in a process of its own: how errors name the run, its settings, its log, the results folder."""


@dataclass(frozen=True)
class FailedRun:
    """A run that failed. log_tail: the last lines of its log."""

    label: str
    seed: int
    how: str
    log_tail: str
    log: Path


@dataclass(frozen=True)
class RunOutcomes:
    """The outcomes of all runs. done: label and seed, those that were done before included."""

    done: tuple[tuple[str, int], ...]
    failed: tuple[FailedRun, ...]


@dataclass(frozen=True)
class Runs:
    """Every cell with every seed. force: also those that are done."""

    cells: tuple[ResolvedCell, ...]
    seeds: tuple[int, ...]
    results: Path
    force: bool = False

    @property
    def all(self) -> list[PendingRun]:
        """The first seed of every cell, then the second: an early end leaves a whole comparison of fewer seeds."""
        return [(cell, seed) for seed in self.seeds for cell in self.cells]

    def to_do(self) -> list[PendingRun]:
        """Runs that are not done yet, or are to be done again."""
        return [(cell, seed) for cell, seed in self.all if self.force or not is_done(cell.folder(seed, self.results))]

    @property
    def at_once(self) -> int:
        """Runs side by side: one where time is measured, as many as there are cores where it is simulated."""
        simulated = all(cell.plan.backend == "virtual" for cell in self.cells)
        return len(os.sched_getaffinity(0)) if simulated else 1

    def estimate(self) -> Estimate:
        """Durations to expect of these runs."""
        return Estimate(self.cells, self.seeds, self.results)


def run_cells(runs: Runs, console: Console, start: StartRun) -> RunOutcomes:
    """Run what is not done yet, each run in a process of its own, and none twice. A run that fails, or lasts longer
    than LIMIT_S, is among the failed. SIGINT and SIGTERM raise KeyboardInterrupt once the runs under way have ended; a
    second one does not wait for that."""
    execution = _Execution(runs, console, start)
    with _interruptible() as interrupt, execution.progress:
        try:
            while (execution.todo or execution.running) and not interrupt.asked:
                execution.step()
                time.sleep(_POLL_S)
        finally:
            for run in execution.running:
                run.process.end()
    if interrupt.asked:
        raise KeyboardInterrupt
    return RunOutcomes(tuple(execution.done), tuple(execution.failed))


@dataclass(frozen=True)
class _Running:
    cell: ResolvedCell
    seed: int
    process: RunProcess


class _Execution:
    """A line for every run that ends; on a terminal a bar."""

    def __init__(self, runs: Runs, console: Console, start: StartRun) -> None:
        self._runs, self._console, self._start_run = runs, beside(console), start
        self._estimate = runs.estimate()
        self.todo = deque(runs.to_do())
        self.running: list[_Running] = []
        self.failed: list[FailedRun] = []
        self.done = [(cell.label, seed) for cell, seed in runs.all if (cell, seed) not in self.todo]
        self.progress = steps_bar("runs", self._console)
        self._bar = self.progress.add_task("", total=len(runs.all), completed=len(self.done))

    def step(self) -> None:
        """Start what may start, and record what has ended."""
        while self.todo and len(self.running) < self._runs.at_once:
            self.running.append(self._start(*self.todo.popleft()))
        for run in list(self.running):
            how = _ended(run, self._runs.results)
            if how is not None:
                self.running.remove(run)
                self._record(run, how)
        now = ", ".join(f"{run.cell.label} seed {run.seed}, {run.process.seconds:.0f} s" for run in self.running)
        self.progress.update(
            self._bar, completed=self._ended, description=" | ".join(filter(None, (self._left(), now)))
        )

    @property
    def _ended(self) -> int:
        return len(self.done) + len(self.failed)

    def _start(self, cell: ResolvedCell, seed: int) -> _Running:
        folder = cell.folder(seed, self._runs.results)
        log = folder.with_name(f"{folder.name}.log")
        settings = [*cell.settings, f"seeds=[{seed}]", *(["force=true"] if self._runs.force else [])]
        process = self._start_run(f"{cell.label} seed {seed}", settings, log, self._runs.results)
        return _Running(cell, seed, process)

    def _record(self, run: _Running, how: str) -> None:
        """how: empty where it ended well."""
        if how:
            self.failed.append(FailedRun(run.cell.label, run.seed, how, run.process.log_tail(), run.process.log))
        else:
            self.done.append((run.cell.label, run.seed))
            self._estimate.took(run.cell, run.process.seconds)
        total = len(self._runs.all)
        line = (
            f"[{self._ended}/{total}] {run.cell.label} seed {run.seed}: {how or 'done'} in {run.process.seconds:.0f} s"
        )
        more = f"; {self._left()}" if self._ended < total else ""
        say(self._console, line + more, "red" if how else "")

    def _left(self) -> str:
        running = [(run.cell, run.process.seconds) for run in self.running]
        left = self._estimate.left([cell for cell, _ in self.todo], running, self._runs.at_once)
        return f"time left {time_text(left)}" if left is None else f"{time_text(left)} left"


def _ended(run: _Running, results: Path) -> str | None:
    """How it failed, empty where it did not; None while it runs."""
    code = run.process.ended()
    if code is None and run.process.seconds > LIMIT_S:
        run.process.end()
        return f"FAILED, not done after {LIMIT_S / 3600:g} h"
    if code is None:
        return None
    if code:
        run.process.clear()
        return f"FAILED with exit code {code}"
    return "" if is_done(run.cell.folder(run.seed, results)) else "FAILED, ended without DONE"


class _Interrupt:
    """The first one is noted: raised while a run is being started it would leave that to nobody."""

    asked = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def _interruptible() -> Iterator[_Interrupt]:
    """SIGTERM ends a comparison as Ctrl-C does, also where a shell in the background has it ignore the latter: what it
    starts would inherit that, and could not be interrupted."""
    interrupt = _Interrupt()
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Estimate:
    """Seconds per run of each cell: means over its finished runs, those of the same job elsewhere before there are any.
    A cell of which nothing is known is taken to be like the others."""

    def __init__(self, cells: Sequence[ResolvedCell], seeds: Iterable[int], results: Path) -> None:
        self._own = {
            cell.label: [took for seed in seeds if (took := _seconds_of(cell.folder(seed, results))) is not None]
            for cell in cells
        }
        self._elsewhere = {cell.label: None if self._own[cell.label] else _elsewhere(cell, results) for cell in cells}

    def took(self, cell: ResolvedCell, seconds: float) -> None:
        """A run of this cell has ended well."""
        self._own[cell.label].append(seconds)

    def of(self, cell: ResolvedCell) -> float | None:
        """Seconds of one run of this cell; None where nothing is known of any."""
        known = {label: guess for label in self._own if (guess := self._guess(label)) is not None}
        return known.get(cell.label, mean(known.values()) if known else None)

    def left(
        self, todo: Iterable[ResolvedCell], running: Iterable[tuple[ResolvedCell, float]], at_once: int
    ) -> float | None:
        """Seconds until runs of the cells of `todo` and those that have been `running` for so many seconds are done."""
        whole = [(cell, 0.0) for cell in todo]
        guesses = [(self.of(cell), spent) for cell, spent in (*whole, *running)]
        seconds = [max(0.0, guess - spent) for guess, spent in guesses if guess is not None]
        return sum(seconds) / at_once if len(seconds) == len(guesses) else None

    def _guess(self, label: str) -> float | None:
        return mean(self._own[label]) if self._own[label] else self._elsewhere[label]


def time_text(seconds: float | None) -> str:
    """Words for so many seconds, or for none known yet."""
    return "unknown until a run is done" if seconds is None else duration(seconds)


def _seconds_of(folder: Path) -> float | None:
    """Seconds of a run from its manifest to DONE. Imports come before, a few seconds. None of a run that is not done,
    or is damaged: an estimate does without it."""
    try:
        if not is_done(folder):
            return None
        return (read_done(folder).at - datetime.fromisoformat(load_manifest(folder)["started_at"])).total_seconds()
    except DamagedFile:
        return None


def _elsewhere(cell: ResolvedCell, results: Path) -> float | None:
    """The latest finished run of this schedule, model, task and backend anywhere, scaled to as many samples."""
    config = cell.config
    names = f"*/{cell_prefix(config)}-*/seed=*/DONE"
    for done in sorted(results.glob(names), key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(DamagedFile):  # of no concern here
            manifest, took = load_manifest(done.parent), _seconds_of(done.parent)
            if took is not None and manifest["backend"] == cell.plan.backend and not manifest["smoke"]:
                samples = load_metrics(done.parent)[-1]["samples"]
                scale = config.iterations * config.algorithm.trained_samples / samples
                return START_S + max(0.0, took - START_S) * scale
    return None


GATE_S = 40.0  # seconds that the runs of an equivalence gate take together, roughly, the first warm start included


def machine_warnings(cells: Sequence[ResolvedCell], machine: Machine) -> list[str]:
    """Facts about this machine that make times of these cells doubtful."""
    plan, cluster = cells[0].plan, cells[0].config.cluster
    if plan.backend == "virtual":
        return []
    warnings = []
    needed = max(cell.plan.placement.total for cell in cells) * cluster.threads_per_device
    if not plan.gpu and needed > machine.cores:
        warnings.append(
            f"{needed} cores are wanted and {machine.cores} are there: devices share cores, so that no time here is to "
            "be trusted; what is learnt per sample is"
        )
    return warnings


def print_preview(
    runs: Runs, skipped: Mapping[str, str], said: Iterable[str], gate_due: bool, console: Console
) -> None:
    """Every cell with its devices and seeds, what cannot run and why, other lines, and how long it will take."""
    plan = runs.cells[0].plan
    if plan.backend != "real":
        print_banner(plan, console)
    if any(cell.planned for cell in runs.cells):
        say(console, "Splits and layouts are the planner's, one for each cell.", "yellow")
    estimate = runs.estimate()
    pending = runs.to_do()
    rows = []
    for cell in runs.cells:
        due = [seed for seed in runs.seeds if (cell, seed) in pending]
        done = [seed for seed in runs.seeds if seed not in due]
        rows.append((cell.label, cell.pools, _listed(done), _listed(due), time_text(estimate.of(cell))))
    console.print(Table("", ("cell", "devices", "seeds done", "seeds to run", "a run takes"), rows))
    for label, why in skipped.items():
        console.print(f"{label} is left out: {why}", style="yellow", highlight=False, markup=False)
    for line in said:
        console.print(line, style="yellow", highlight=False, markup=False)
    left = estimate.left([cell for cell, _ in pending], [], runs.at_once)
    if gate_due and left is not None:
        left += GATE_S
    what = f"{len(pending)} of {len(runs.all)} runs to do" + (", and the equivalence gate" if gate_due else "")
    what = f"{what}: {time_text(left)}" if pending or gate_due else "all runs are done already"
    console.print(what, style="bold", highlight=False)


def print_failures(failed: Iterable[FailedRun], console: Console) -> None:
    """Print which runs failed, with the end of each log and where the rest of it is."""
    for failure in failed:
        say(console, f"{failure.label} seed {failure.seed} {failure.how}; its log is {failure.log}", "bold red")
        say(console, "\n".join(f"  {line}" for line in failure.log_tail.splitlines()), "red")


def _listed(seeds: Sequence[int]) -> str:
    return " ".join(str(seed) for seed in seeds) or "-"
