"""What one run does about roles that died, whatever its attempts are."""

from __future__ import annotations

import signal
from io import StringIO
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
from rich.console import Console

from harness.checks.job import plan_job
from harness.config import ConfigError
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import NO_MACHINE
from harness.driver import run
from harness.driver.checkpointing import Left
from harness.driver.recorder import Recorder
from harness.driver.restarts import GivenUp
from harness.metrics.done import is_done
from harness.metrics.run_files import load_manifest
from harness.runtime.interrupts import LeaveRequest, leaving_when_asked
from harness.runtime.runtime import WorkerDied


def test_a_run_that_what_is_left_has_no_room_for_says_what_was_lost_and_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [WorkerDied("actor[0] died during train: its host is gone"), ConfigError("Ray could not place 3 devices")]
    monkeypatch.setattr(run, "_attempt", Mock(side_effect=ends))

    with pytest.raises(GivenUp, match=r"actor\[0\] died.*could not place 3 devices; checkpoints are kept"):
        run.run_seed(compose_job(["checkpoint.every=1"]), Mock(), 0, tmp_path, Console(), LeaveRequest())


def test_a_run_goes_on_with_the_files_that_it_began_with_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(
        ConfigError, match=r"lengths\.txt has changed since .*; put it back, or start anew with force=true"
    ):
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
def test_a_run_that_was_trained_is_not_trained_again_wherever_its_end_was_cut_off(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_dies_after_sigterm_asked_to_leave_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = LeaveRequest()

    def die(*arguments: object) -> None:
        leave(signal.SIGTERM, None)
        raise WorkerDied("actor[0] died during train: killed")

    monkeypatch.setattr(run, "_attempt", attempt := Mock(side_effect=die))
    with pytest.raises(Left, match=r"after actor\[0\] died during train: killed, with what was saved before"):
        run.run_seed(compose_job(["checkpoint.every=1"]), Mock(), 0, tmp_path, Console(), leave)
    assert attempt.call_count == 1


def test_sigterm_while_a_run_starts_ends_it_at_once_though_it_makes_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_job(["backend=virtual", "cost=tiny_cpu", "checkpoint.every=1"])
    plan = plan_job(config, make_schedule(config), NO_MACHINE)
    monkeypatch.setattr(run, "_start", lambda *parts: signal.raise_signal(signal.SIGTERM))

    with leaving_when_asked(at_once=False) as leave, pytest.raises(Left, match="asked, before it began: the same"):
        run.run_seed(config, plan, 0, tmp_path, Console(quiet=True), leave)
    assert leave.asked and not leave.at_once
