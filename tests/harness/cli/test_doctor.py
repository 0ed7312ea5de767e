"""What `make doctor` finds on machines that are made up here, and what it says about each."""

import sys
from pathlib import Path

import psutil
import pytest

from harness.cli import doctor
from harness.cli import main as cli
from harness.config.machine import Machine

GIB = 1 << 30


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that lacks nothing; returns its results folder."""
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(cores=8, gpus=2, gpu_bytes=80 * GIB))
    memory = psutil.virtual_memory()._replace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor, "installed", lambda package: "1.0")
    return tmp_path / "results"


def finding(results: Path, what: str) -> doctor.Finding:
    (found,) = [finding for finding in doctor.examine(results) if finding.what == what]
    return found


def test_a_machine_that_lacks_nothing_has_no_bad_finding(good: Path) -> None:
    found = {finding.what: finding for finding in doctor.examine(good)}
    assert not [what for what, finding in found.items() if finding.grade == "bad"]
    assert found["cores"].found == "8" and found["GPUs"].found == "2 with 80 GiB"
    assert found["memory"].found == "64 GiB, 48 GiB free"
    assert {"python", "torch", "ray", "mlflow", "ports", "results", "shared memory"} <= set(found)
    assert list(good.iterdir()) == [], "trying to write leaves nothing"


def test_what_a_machine_lacks_is_bad_and_one_core_is_noted(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(cores=1, gpus=0, gpu_bytes=0))
    cores = finding(good, "cores")
    assert cores.grade == "note" and "schedule=colocate_sync cluster.devices=1" in cores.meaning
    assert finding(good, "GPUs").grade == "note"
    memory = psutil.virtual_memory()._replace(total=4 * GIB, available=1 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert finding(good, "memory").grade == "bad" and finding(good, "memory").meaning
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    found = finding(good, "python")
    assert (found.grade, found.found) == ("bad", "3.10.1") and "3.11" in found.meaning
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    assert finding(good, "torch").grade == "bad" and "pip install torch" in finding(good, "torch").meaning


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert doctor.installed("torch") and doctor.installed("no-such-distribution") is None


def test_results_a_port_or_ray_that_cannot_be_had_are_bad(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert finding(good, "ray").grade == "ok"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert finding(good, "ray").grade == "bad" and "10.0.0.1:6379" in finding(good, "ray").meaning
    good.rmdir()
    good.write_text("a file where the folder should be")
    found = finding(good, "results")
    assert found.grade == "bad" and "CADENCE_RESULTS" in found.meaning

    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(doctor.socket, "socket", refuse)
    assert finding(good, "ports").grade == "bad"


def test_what_is_bad_fails(good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "RESULTS", good)
    assert cli.main(["doctor"]) == 0
    assert "2 with 80 GiB" in capsys.readouterr().out
    good.rmdir()
    good.write_text("")
    assert cli.main(["doctor"]) == 1
    assert "missing  results" in capsys.readouterr().out


@pytest.mark.slow
def test_with_a_job_it_says_what_lies_on_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["model=qwen7b", "cluster.devices=8", "device=h100", "max_tokens=2048"]
    assert cli.main(["doctor", "schedule=fully_async", *job]) == 0
    said = capsys.readouterr().out
    for part in ("fully_async, qwen7b on 8 of 8 x 79.6 GiB", "KV cache", "optimizer state", "fits: at most "):
        assert part in said
    assert cli.main(["doctor", *job]) == 0
    assert "half" in capsys.readouterr().out, "a row for each schedule"
    assert cli.main(["doctor", "schedule=fully_async", "model=qwen32b", *job[1:]]) == 1
    assert "does not fit: at most" in capsys.readouterr().out
