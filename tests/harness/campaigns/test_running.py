"""Runs of a campaign, played by a tiny function: their order, what fails, what is interrupted, what is done already."""

import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from harness.campaigns import execution, process
from harness.campaigns.cells import CellRequest, ResolvedCell, resolve_cell
from harness.campaigns.execution import RunOutcomes, Runs, StartRun, run_cells
from harness.campaigns.process import RunProcess
from harness.cli.console import PlainTextConsole
from harness.config.machine import Machine
from harness.runtime.fork_server import ForkServer
from tests.support.played_runs import play


@pytest.fixture(scope="module")
def cells() -> tuple[ResolvedCell, ...]:
    """Two that would run for real, so that they run one after another."""
    machine = Machine(cores=2, gpus=0, gpu_bytes=0)
    names = ("one_step_off", "fully_async")
    return tuple(resolve_cell(CellRequest(name, (f"schedule={name}", "backend=real")), machine) for name in names)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_POLL_S", 0.01)


@contextmanager
def fork_server(preload: str = play.__module__) -> Iterator[ForkServer]:
    with closing(ForkServer.launch([preload], os.environ)) as launched:
        yield launched


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as launched:
        yield launched


class Played:
    """What runs do, by label and seed, and what was begun in which order. Without a server each is spawned."""

    def __init__(self, folder: Path, cells: tuple[ResolvedCell, ...], server: ForkServer | None, **does: str) -> None:
        self.results, self.log, self.cells, self.does = folder / "results", folder / "log", cells, does
        self.server, self.said = server, io.StringIO()

    def start(self, what: str, settings: Sequence[str], log: Path, results: Path) -> RunProcess:
        does = self.does.get(what.replace(" seed ", "_"), "done")
        arguments = [str(log.with_suffix("")), does, str(self.log), os.getpid()]
        if self.server is not None:
            return RunProcess.fork(what, self.server, play, arguments, log)
        return RunProcess.spawn(what, [sys.executable, "-m", play.__module__, *map(str, arguments)], log, {})

    def run(self, seeds: int = 2, force: bool = False) -> RunOutcomes:
        start: StartRun = self.start
        self.log.write_text("")
        runs = Runs(self.cells, tuple(range(seeds)), self.results, force)
        results = PlainTextConsole(file=io.StringIO(), beside=Console(file=self.said, width=200))
        outcomes = run_cells(runs, results, start)
        assert not results.file.getvalue(), "of results there are none yet"  # type: ignore[attr-defined]
        return outcomes

    @property
    def begun(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if not line.startswith("pid")]

    @property
    def left_alive(self) -> list[int]:
        """Processes that the runs named, and that are still there."""
        pids = [int(line.split()[1]) for line in self.log.read_text().splitlines() if line.startswith("pid")]
        assert pids, "no run got that far"
        there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, left = psutil.wait_procs(there, timeout=20)
        return [process.pid for process in left if process.status() != psutil.STATUS_ZOMBIE]


ALL = [("one_step_off", 0), ("fully_async", 0), ("one_step_off", 1), ("fully_async", 1)]
ORDER = [f"{label} {seed}" for label, seed in ALL]


def test_first_seeds_come_before_second(tmp_path: Path, cells: tuple[ResolvedCell, ...], server: ForkServer) -> None:
    played = Played(tmp_path, cells, server)
    assert played.run() == RunOutcomes(tuple(ALL), ())
    assert played.begun == ORDER
    lines = played.said.getvalue().splitlines()
    assert lines[0].startswith("[1/4] one_step_off seed 0: done in ") and lines[0].endswith(" left")
    assert lines[3].startswith("[4/4] fully_async seed 1: done in ") and "left" not in lines[3]


def test_what_is_done_runs_again_if_forced(tmp_path: Path, cells: tuple[ResolvedCell, ...], server: ForkServer) -> None:
    played = Played(tmp_path, cells, server)
    played.run()
    shutil.rmtree(cells[1].folder(0, played.results))
    assert set(played.run().done) == set(ALL) and played.begun == ["fully_async 0"]
    assert played.run(seeds=3).failed == () and played.begun == ["one_step_off 2", "fully_async 2"]
    assert Runs(cells, (0,), played.results, force=True).to_do() == [(cell, 0) for cell in cells]


def test_what_fails_is_named_and_ends_none(tmp_path: Path, cells: tuple[ResolvedCell, ...], server: ForkServer) -> None:
    played = Played(tmp_path, cells, server, one_step_off_0="fail", fully_async_1="nothing")
    outcome = played.run()
    assert played.begun == ORDER, "each once: nothing is tried again"
    assert outcome.done == (("fully_async", 0), ("one_step_off", 1))
    failed, silent = outcome.failed
    assert (failed.label, failed.seed, failed.how) == ("one_step_off", 0, "FAILED with exit code 3")
    assert failed.log_tail.endswith("the last words") and failed.log.read_text().startswith("a first line")
    assert failed.log == cells[0].folder(0, played.results).with_name("seed=0.log")
    assert (silent.label, silent.seed, silent.how) == ("fully_async", 1, "FAILED, ended without DONE")
    played.does.clear()
    assert played.run().failed == () and played.begun == ["one_step_off 0", "fully_async 1"]


@pytest.fixture
def patient() -> Iterator[None]:
    """Whoever runs the tests may ignore signals; what is here before must be here again."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("spawned", [False, True], ids=["forked", "spawned"])
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "deaf"])
def test_an_interrupt_ends_the_run_with_all_that_it_started(
    how: str,
    spawned: bool,
    tmp_path: Path,
    cells: tuple[ResolvedCell, ...],
    server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "END_S", 1.0 if how == "deaf" else 60.0)
    played = Played(tmp_path, cells, None if spawned else server, fully_async_0=how)
    with pytest.raises(KeyboardInterrupt):
        played.run()
    assert played.begun == ORDER[:2] and not played.left_alive
    played.does.clear()
    assert set(played.run().done) == set(ALL) and played.begun == ORDER[1:], "the same again goes on"


@pytest.mark.usefixtures("patient")
def test_a_run_that_is_being_started_as_the_interrupt_comes_is_ended_too(
    tmp_path: Path, cells: tuple[ResolvedCell, ...], server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path, cells, server, one_step_off_0="SIGINT")
    start = played.start

    def slow(*arguments: Any) -> RunProcess:
        run, until = start(*arguments), time.monotonic() + 60
        while "pid" not in played.log.read_text() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)
        return run

    monkeypatch.setattr(played, "start", slow)
    with pytest.raises(KeyboardInterrupt):
        played.run()
    assert played.begun == ORDER[:1] and not played.left_alive


def test_a_run_that_lasts_longer_than_the_limit_is_ended_and_among_the_failed(
    tmp_path: Path, cells: tuple[ResolvedCell, ...], server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "LIMIT_S", 0.5)
    played = Played(tmp_path, cells[:1], server, one_step_off_0="hang")
    (failed,) = played.run(seeds=1).failed
    assert failed.how.startswith("FAILED, not done after ")


@pytest.mark.parametrize("spawned", [False, True], ids=["forked", "spawned"])
def test_no_run_outlives_the_campaign_killed(spawned: bool, tmp_path: Path, cells: tuple[ResolvedCell, ...]) -> None:
    """Here the run itself kills the campaign."""
    played = Played(tmp_path, cells[:1], None, one_step_off_0="SIGKILL")
    pid = os.fork()
    if pid == 0:
        with nullcontext() if spawned else fork_server() as played.server:
            played.run(seeds=1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL and not played.left_alive


def test_a_server_that_is_gone_fails_its_runs_and_says_so(tmp_path: Path, cells: tuple[ResolvedCell, ...]) -> None:
    with fork_server("tests.support.nothing") as server:
        (failed,) = Played(tmp_path, cells[:1], server).run(seeds=1).failed
        assert server.has_ended()
    assert failed.how == "FAILED with exit code 1" and "the server that forks it has ended" in failed.log_tail


def test_what_has_not_begun_yet_need_not_be_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with fork_server("tests.support.played_runs:hang") as server:
        run = RunProcess.fork("the run", server, play, [str(tmp_path), "hang", str(log), 0], tmp_path / "out")
        run.end()
    assert server.has_ended() and not log.exists()
