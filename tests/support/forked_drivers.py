"""Real runs whose drivers are forked from one process that has imported everything, as those of a comparison are.

A short run by a command is imports above all; that both are the same run, to the bit, is for
tests/integration/test_comparison. A third of what is left would be pictures, which are left out.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import psutil

from harness.campaigns.process import RunProcess
from harness.cli import forked_runs
from harness.cli.forked_runs import ForkedRuns
from tests.support import undrawn
from tests.support.real_runs import FIRST_TIMEOUT_S, RUN_TIMEOUT_S, lines, logs

Kill = tuple[str, int]
"""A process by its name, which is killed once so many iterations are written down: "host", "device[1]", "queue"."""
Family = Callable[[], Sequence[psutil.Process]]

_GONE_S = 60.0


@contextmanager
def forked_drivers() -> Iterator["Drivers"]:
    """Imports once for all runs, with the first of them, which sees the environment of that moment."""
    preload = (*forked_runs.DRIVER_PRELOAD, f"{undrawn.__name__}:leave_out")
    with patch.object(forked_runs, "DRIVER_PRELOAD", preload), ForkedRuns() as runs:
        yield Drivers(runs)


class Drivers:
    """One run at a time, so that all that the one process has forked belongs to it. Workers see the environment of when
    the first run was begun: what sets variables for them needs runs of its own."""

    def __init__(self, runs: ForkedRuns) -> None:
        self._runs = runs
        self._whole: dict[tuple[str, ...], Path] = {}

    def bench(self, results: Path, experiment: str, *settings: str) -> Path:
        """As `python -m harness bench` with these settings; the folder of seed 0."""
        return self._bench(results, experiment, settings, RUN_TIMEOUT_S)

    def _bench(self, results: Path, experiment: str, settings: Sequence[str], within_s: float) -> Path:
        began = time.time()
        with self._run(results, experiment, settings) as run:
            code = _end_of(run, within_s)
        assert code == 0, run.log.read_text()[-8000:] + logs(results, began)
        return folder_of(results, experiment)

    def bench_all(self, results: Path, settings: Mapping[str, str]) -> dict[str, Path]:
        """The folder of each experiment's seed 0."""
        return {name: self._bench(results, name, given.split(), FIRST_TIMEOUT_S) for name, given in settings.items()}

    def whole(self, results: Path, *settings: str) -> Path:
        """A run to which nothing happens, made once for all that are compared with it."""
        if settings not in self._whole:
            self._whole[settings] = self.bench(results, f"whole_{len(self._whole)}", *settings)
        return self._whole[settings]

    def killed(
        self,
        results: Path,
        experiment: str,
        settings: Sequence[str],
        after: int,
        how: signal.Signals = signal.SIGKILL,
        later_s: float = 0.0,
    ) -> tuple[int, str]:
        """A run whose driver is sent a signal after so many iterations and seconds, and nothing is left: its exit code,
        and what it said."""
        assert not (results / experiment).exists(), f"another test of this process has made {experiment}"
        with self._run(results, experiment, settings) as run:
            _wait(run, lambda: lines(results, experiment) >= after)
            time.sleep(later_s)
            family: list[psutil.Process] = []
            if run.ended() is None and run.pid is not None:
                os.kill(run.pid, signal.SIGSTOP)  # on a busy machine it could end while its family is looked for
                family = _family(run)
                os.kill(run.pid, how)
                with suppress(ProcessLookupError):  # it was SIGKILL
                    os.kill(run.pid, signal.SIGCONT)
            code = _end_of(run)
        _, left = psutil.wait_procs(family, timeout=_GONE_S)
        assert not left, "what outlived its driver"
        return code, run.log.read_text()

    def run_killed(
        self,
        results: Path,
        experiment: str,
        settings: Sequence[str],
        kills: Sequence[Kill],
        how: signal.Signals = signal.SIGKILL,
    ) -> tuple[int, str]:
        """A run of which one process or another is killed meanwhile, or stopped, and nothing is left: its exit code,
        and what it said."""
        family: list[psutil.Process] = []
        with self._run(results, experiment, settings) as run:
            for name, after in kills:
                _wait(run, lambda after=after: lines(results, experiment) >= after)  # type: ignore[misc]
                found = _wait(run, lambda name=name: _strike(run, name, how))  # type: ignore[misc]
                assert found, f"it ended before {name} could be killed:\n{run.log.read_text()}"
                family = _family(run)
            code = _end_of(run)
            _, left = psutil.wait_procs(family, timeout=_GONE_S)
            assert not left, "what outlived its driver"
            return code, run.log.read_text()

    @contextmanager
    def _run(self, results: Path, experiment: str, settings: Sequence[str]) -> Iterator[RunProcess]:
        told = [f"experiment={experiment}", "seeds=[0]", *settings]
        run = self._runs.start(experiment, told, results / f"{experiment}.log", results)
        try:
            _wait(run, lambda: run.pid is not None)
            yield run
        finally:
            run.end()


def folder_of(results: Path, experiment: str) -> Path:
    (folder,) = (results / experiment).glob("*/seed=0")
    return folder


def _wait(run: RunProcess, due: Callable[[], bool], within_s: float = RUN_TIMEOUT_S) -> bool:
    """Until it is so; False where the run ends before."""
    while run.ended() is None:
        if due():
            return True
        if run.seconds > within_s:
            raise TimeoutError(f"{run.what} has run for {within_s} s:\n{run.log_tail()}")
        time.sleep(0.01)
    return False


def _end_of(run: RunProcess, within_s: float = RUN_TIMEOUT_S) -> int:
    _wait(run, lambda: False, within_s)
    code = run.ended()
    assert code is not None
    return code


def _family(run: RunProcess) -> list[psutil.Process]:
    """The driver, its workers, and what they have started; none where it has ended."""
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(run.pid).parent()
        return [] if server is None else server.children(recursive=True)
    return []


def _strike(run: RunProcess, name: str, how: signal.Signals) -> bool:
    assert run.pid is not None
    return strike(run.pid, name, lambda: _family(run), how)


def strike(driver: int, name: str, family: Family, how: signal.Signals = signal.SIGKILL) -> bool:
    """Kills the one of a driver's processes that is called so, where there is one. The driver stands still meanwhile,
    for on a busy machine they are looked for longer than an iteration lasts."""
    os.kill(driver, signal.SIGSTOP)
    found = named(family(), name)
    if found:
        os.kill(found[0], how)
    os.kill(driver, signal.SIGCONT)
    return bool(found)


def named(family: Sequence[psutil.Process], name: str) -> list[int]:
    """Ids of those of a run's processes that are called so: "host", "device[1]", "queue"."""
    found = []
    for process in family:
        with suppress(psutil.NoSuchProcess):
            queue = "harness.transfer_queue.remote.process" in process.cmdline()
            if process.name() == name or (queue and name == "queue"):
                found.append(process.pid)
    return found
