"""What one run does about roles that died, whatever its attempts are."""

import os
import signal
import sys
from io import StringIO
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
from rich.console import Console
from safetensors import SafetensorError

from harness.checks.job import plan_job
from harness.cli.console import PlainTextConsole
from harness.cli.main import answered
from harness.config import ConfigError
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import NO_MACHINE
from harness.driver import run
from harness.driver.checkpointing import Left
from harness.driver.endings import storage_in
from harness.driver.recorder import Recorder
from harness.driver.restarts import GivenUp
from harness.metrics.done import is_done
from harness.metrics.run_files import load_manifest
from harness.runtime.interrupts import LeaveRequest, leaving_when_asked
from harness.runtime.runtime import WorkerDied
from harness.transfer_queue.control.spec import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess


def test_a_run_without_room_says_what_was_lost_and_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [WorkerDied("actor[0] died during train: its host is gone"), ConfigError("Ray could not place 3 devices")]
    monkeypatch.setattr(run, "_attempt", Mock(side_effect=ends))

    with pytest.raises(GivenUp, match=r"actor\[0\] died.*could not place 3 devices; checkpoints are kept"):
        run.run_seed(compose_job(["checkpoint.every=1"]), Mock(), 0, tmp_path, Console(), LeaveRequest())


def test_a_run_goes_on_with_the_files_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("10\n20\n")
    trace = ("cost.lengths.kind=trace", f"cost.lengths.path={lengths}")
    config = compose_job(["backend=virtual", "cost=tiny_cpu", *trace, "iterations=4", "checkpoint.every=2"])
    plan = plan_job(config, make_schedule(config), NO_MACHINE)
    monkeypatch.setattr(run, "Loggers", MagicMock())

    def attempt() -> Path:
        return run.run_seed(config, plan, 0, tmp_path / "results", Console(quiet=True), LeaveRequest())

    with monkeypatch.context() as killed, pytest.raises(RuntimeError, match="killed"):
        killed.setattr(Recorder, "write", Mock(side_effect=RuntimeError("killed")))
        attempt()
    before = {path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()}
    lengths.write_text("10\n30\n")
    with pytest.raises(ConfigError, match=r"lengths\.txt has changed since .*; put it back, or start anew with force"):
        attempt()
    assert before == {path: path.read_bytes() for path in before}
    lengths.write_text("10\n20\n")
    assert load_manifest(attempt())["resumed"] == [2]


@pytest.mark.parametrize(
    "where",
    [
        "harness.metrics.run_files.write_table",
        "harness.metrics.run_files.RunDirectory.write_trace",
        "harness.metrics.run_files.shutil.rmtree",
        "harness.metrics.run_files.RunDirectory.write_summary",
        "harness.report.plots.draw_run",
        "harness.metrics.run_files.write_done",
    ],
)
def test_a_run_that_was_trained_is_not_again(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_job(["backend=virtual", "cost=tiny_cpu", "iterations=3"])
    plan = plan_job(config, make_schedule(config), NO_MACHINE)
    monkeypatch.setattr(run, "Loggers", MagicMock())
    monkeypatch.setattr("harness.report.plots.draw_run", lambda folder: (folder / "idle.png").touch())

    def attempt(results: Path, told: Console) -> Path:
        return run.run_seed(config, plan, 0, results, told, LeaveRequest())

    whole = attempt(tmp_path / "whole", Console(quiet=True))
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(where, Mock(side_effect=KeyboardInterrupt))
        attempt(tmp_path / "cut", Console(quiet=True))
    monkeypatch.setattr(run, "Session", Mock(side_effect=AssertionError("it is trained again")))
    told = StringIO()
    finished = attempt(tmp_path / "cut", Console(file=told, width=1000))
    assert "was trained to its end: what is left of its files is written" in told.getvalue()
    assert is_done(finished) and {path.name for path in whole.iterdir()} == {path.name for path in finished.iterdir()}
    for name in ("metrics.jsonl", "samples.parquet", "ledger.json", "trace.json", "summary.json"):
        assert (whole / name).read_bytes() == (finished / name).read_bytes(), name


def test_what_dies_after_sigterm_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = LeaveRequest()

    def die(*arguments: object) -> None:
        leave(signal.SIGTERM, None)
        raise WorkerDied("actor[0] died during train: killed")

    monkeypatch.setattr(run, "_attempt", attempt := Mock(side_effect=die))
    with pytest.raises(Left, match=r"after actor\[0\] died during train: killed, with what was saved before"):
        run.run_seed(compose_job(["checkpoint.every=1"]), Mock(), 0, tmp_path, Console(), leave)
    assert attempt.call_count == 1


def test_sigterm_while_a_run_starts_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_job(["backend=virtual", "cost=tiny_cpu", "checkpoint.every=1"])
    plan = plan_job(config, make_schedule(config), NO_MACHINE)
    monkeypatch.setattr(run, "_start", lambda *parts: signal.raise_signal(signal.SIGTERM))

    with leaving_when_asked(at_once=False) as leave, pytest.raises(Left, match="asked, before it began: the same"):
        run.run_seed(config, plan, 0, tmp_path, Console(quiet=True), leave)
    assert leave.asked and not leave.at_once


@pytest.mark.parametrize(
    "said", ["I/O error: No space left on device (os error 28)", "[Errno 28] Error writing bytes to file"]
)
def test_a_full_disk_is_read_from_what_libraries_say_of_it(said: str, tmp_path: Path) -> None:
    told = storage_in([SafetensorError(said)], tmp_path)
    assert told is not None and told.startswith(f"{tmp_path}: No space left on device: results cannot be written")


def test_a_wait_in_vain_and_sigterm_before_a_run_began_are_a_line_each(capfd: pytest.CaptureFixture[str]) -> None:
    def waits() -> int:
        raise ExceptionGroup("of a run", [TimeoutError("device[0] was not ready within 40.0 s"), TimeoutError()])

    def is_ended() -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    console = PlainTextConsole(file=sys.stderr)
    assert answered(waits, console) == 1
    assert answered(is_ended, console) == 128 + signal.SIGTERM
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "device[0] was not ready within 40.0 s" and said[2].startswith("ended by SIGTERM; ")


def test_a_queue_that_dies_while_it_starts_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nkill -TERM $$\n")
    os.chmod(tmp_path / "python", 0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    spec = QueueSpec({"reward": ColumnSpec("float32")}, {"train": TaskSpec(("reward",))})
    with pytest.raises(ConnectionError, match="the transfer queue was killed by signal 15 before it was ready"):
        QueueProcess.start(spec)
