"""The gate itself on the CPU: whole jobs with all packages, everything else with torch and transformers alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from harness.acceptance.gpu_gate.gate import PARTS, request
from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts import engines
from harness.acceptance.gpu_gate.results import LeftOut, PartResult, read_result
from harness.cli.costs import calibrate
from harness.config import ConfigError
from harness.config.registries import SCHEDULES
from tests.support.bare_machine import bare_environment
from tests.support.project import ROOT


def gate(folder: Path, environment: dict[str, str], *arguments: str, status: int = 0) -> dict[str, PartResult]:
    """What each part found, and the gate's own exit status has to be this."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.acceptance.gpu_gate", "device=cpu", f"results={folder}", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    outcome = "nothing failed" if status else "passed"
    assert (folder / "gate-gpu/cpu/gate.md").read_text().startswith(f"# The gate on cpu: {outcome}")
    found = {part.name: read_result(folder / "gate-gpu/cpu", part.name) for part in PARTS}
    return {name: result for name, result in found.items() if result is not None}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_gate_passes_where_only_torch_and_transformers_can_be_imported(tmp_path: Path) -> None:
    found = gate(tmp_path, bare_environment(tmp_path), status=3)
    assert [name for name, result in found.items() if result.status == "left out"] == ["engines", "jobs"]
    assert found["jobs"].why.startswith("needs msgspec==") and "hydra-core==" in found["jobs"].why
    assert found.keys() == {part.name for part in PARTS}


def test_engines_without_an_environment_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LeftOut, match="make setup-vllm"):
        list(engines.run(GateSetting("cpu", tmp_path)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_jobs_run_under_every_schedule_and_their_times_become_costs(tmp_path: Path) -> None:
    found = gate(tmp_path, os.environ | {"PYTHONPATH": str(ROOT)}, "parts=jobs,profile")
    assert len(found["jobs"].checks) == len(SCHEDULES) + 1 and not found["jobs"].left_out
    trials = [check.found for check in found["jobs"].checks if check.what.startswith("trial of ")]
    assert len(trials) == len(SCHEDULES) - 1 and all("no measurement of the schedule" in said for said in trials)
    assert calibrate([f"run={tmp_path}/gate-gpu/cpu/results.json", "name=mine"], tmp_path, Console()) == 0
    assert (tmp_path / "costs/mine.yaml").is_file()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "tpu"}, "device=tpu is unknown; choose cpu or gpu"),
        ({"limit_s": "soon"}, "limit_s=soon is no number"),
    ],
)
def test_what_cannot_be_asked_of_the_gate_is_one_line(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        request(given)


def test_a_job_of_another_engine_takes_nothing_from_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".venv-vllm").mkdir()
    (tmp_path / ".venv-vllm/.installed").touch()
    (tmp_path / "Makefile").write_text(
        'bench:\n\t@test "$(ENGINE)" = vllm && test -z "$(DEVICE)$(findstring PARTS,$(MAKEOVERRIDES))"\n'
        "\tmkdir -p $(CADENCE_RESULTS)/vllm/cell\n"
        """\techo '{"policy/mismatch_kl": 0}' > $(CADENCE_RESULTS)/vllm/cell/metrics.jsonl\n"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAKEFLAGS", " -- PARTS=engines DEVICE=cpu")
    monkeypatch.setenv("DEVICE", "cpu")
    checks = {check.what: check for check in engines.run(GateSetting("cpu", tmp_path))}
    assert checks["vllm"].passed, checks["vllm"]
    assert "make setup-sglang" in checks["sglang"].found and checks["sglang"].left_out
