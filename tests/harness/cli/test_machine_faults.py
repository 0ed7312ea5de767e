"""What a command says, and leaves, where the machine fails it: a line, an exit code, nothing torn."""

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.cli import main as cli
from harness.config.compose import compose_job
from harness.driver.listeners import IterationListener
from harness.driver.session import Session, simulate
from harness.metrics.run_files import RunDirectory, load_samples
from harness.runtime.interrupts import Terminated, leaving_when_asked
from harness.runtime.runtime import RealClock
from tests.support.project import ROOT


def answered(work: Callable[[], int]) -> tuple[int, str]:
    told = StringIO()
    return cli.answered(work, Console(file=told)), told.getvalue()


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


# -- the file system


@contextmanager
def full_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A file system of its own; skips where this user may mount none."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def written_run(results: Path, broken: Callable[[int], None]) -> RunDirectory:
    """A simulated run whose files are written as it goes; broken: called before each iteration is written down."""
    config = compose_job(["backend=virtual", "cost=tiny_cpu", "schedule=fully_async", "iterations=300"])
    folder = RunDirectory(results, "e", "c", 0)

    def writes(session: Session) -> None:
        session.recorder.write_into(folder)
        session.recorder.listeners.append(IterationListener(lambda metrics: broken(int(metrics["iteration"]))))
        session.recorder.listeners.append(IterationListener(folder.append_metrics))

    with folder:
        recorder = simulate(config, 0, started=writes)
        recorder.write(folder)
        folder.finish()
    return folder


def is_closed(folder: RunDirectory) -> bool:
    """Somebody else can take it."""
    again = RunDirectory(folder.path.parents[2], "e", "c", 0, lambda path: [one.name for one in path.iterdir()])
    with again:
        return True


def test_a_full_disk_ends_a_run_in_a_line_and_files_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(tmp_path / "small", kib=200) as results:
        monkeypatch.setattr(cli, "RESULTS", results)
        code, told = answered(lambda: written_run(results, lambda iteration: None) and 0)
        assert code == 1
        assert told.startswith(f"{results}") and "No space left on device: results cannot be written" in told
        (folder,) = results.glob("e/c/seed=0")
        assert not (folder / "DONE").exists() and not list(folder.glob(".*.tmp"))
        assert len(load_samples(folder)) > 0


def test_a_folder_that_vanishes_ends_a_run_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    monkeypatch.setattr(cli, "RESULTS", results)
    monkeypatch.setattr("harness.driver.recorder._LEDGER_EVERY_S", 0.0)

    def vanishes(iteration: int) -> None:
        if iteration == 3:
            shutil.rmtree(results)

    code, told = answered(lambda: written_run(results, vanishes) and 0)
    assert code == 1
    assert "No such file or directory: results cannot be written" in told and str(results) in told


@pytest.mark.parametrize("number", [errno.EROFS, errno.EDQUOT, errno.ENOSPC, errno.EFBIG])
def test_what_a_file_system_refuses_is_a_line_also_of_another_process(number: int) -> None:
    code, told = answered(raising(ExceptionGroup("of a worker", [OSError(number, os.strerror(number))])))
    assert code == 1 and f"{os.strerror(number)}: results cannot be written" in told


def test_a_file_missing_elsewhere_is_no_fault_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/nowhere/else")
    with pytest.raises(FileNotFoundError):
        answered(raising(missing))


def test_a_run_whose_file_cannot_be_closed_gives_its_folder_back(tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path, "e", "c", 0)

    class Full:
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"), folder:
        folder._metrics.close()
        folder._metrics = Full()  # type: ignore[assignment]
    assert is_closed(folder)


# -- memory


def test_a_role_that_finds_no_memory_is_named_also_where_torch_says_so() -> None:
    error = MemoryError("Unable to allocate 3.00 GiB")
    error.add_note("in rollout[1].generate:\nTraceback ...")
    code, told = answered(raising(ExceptionGroup("the job", [error])))
    assert code == 1
    assert told.startswith("rollout[1].generate ran out of memory: Unable to allocate 3.00 GiB; lower engine.slots")
    code, told = answered(raising(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")))
    assert code == 1 and told.startswith("this process ran out of memory: ")


# -- the clock


def test_no_time_of_a_run_is_of_a_clock_that_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds since 1970 are written down for people; whoever else reads them is listed here."""
    readers = {"harness/metrics/system.py", "harness/metrics/mlflow_mirror.py"}
    found = {
        str(path.relative_to(ROOT))
        for folder in ("harness", "engines", "schedules")
        for path in (ROOT / folder).rglob("*.py")
        if "time.time(" in path.read_text(encoding="utf-8")
    }
    assert found == readers
    clock = RealClock.starting_now()
    for jump in (1e9, -1e9):
        monkeypatch.setattr("time.time", lambda jump=jump: jump)
        before = clock.now()
        assert before <= clock.now() < 3600


# -- signals


def test_sigterm_without_checkpoints_is_a_line_and_a_code_and_ctrl_c_another() -> None:
    def work() -> int:
        with leaving_when_asked(at_once=True):
            signal.raise_signal(signal.SIGTERM)
        return 0

    before: Any = signal.getsignal(signal.SIGTERM)
    code, told = answered(work)
    assert code == 143 and told.startswith("ended by SIGTERM; ") and signal.getsignal(signal.SIGTERM) is before

    def work() -> int:
        with leaving_when_asked(at_once=True):
            signal.raise_signal(signal.SIGINT)
        return 0

    assert answered(work)[0] == 130
    assert issubclass(Terminated, KeyboardInterrupt), "whoever cleans up after the one does so after the other"
