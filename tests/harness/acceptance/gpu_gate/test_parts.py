"""The gate itself on the CPU: whole jobs and a profile with all packages, everything else without most of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.acceptance.gpu_gate.gate import PARTS, request
from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts import engines
from harness.acceptance.gpu_gate.results import LeftOut
from harness.config import ConfigError
from tests.support.project import ROOT

ABSENT = ("ray", "hydra", "omegaconf", "mlflow", "vllm", "sglang", "datasets", "pynvml")


def gate(folder: Path, path: list[str], *arguments: str) -> dict[str, str]:
    """Status of each part; the gate has to pass."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.acceptance.gpu_gate", "device=cpu", f"results={folder}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "gate-gpu/cpu/gate.md").read_text().startswith("# The gate on cpu: passed")
    return {
        path.stem: json.loads(path.read_text())["status"]
        for path in folder.glob("gate-gpu/cpu/*.json")
        if path.stem in {part.name for part in PARTS}
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gate_passes_where_only_torch_and_transformers_are(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ABSENT:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n")
    parts = [part.name for part in PARTS if part.name != "engines"]  # those have environments of their own
    found = gate(tmp_path, [str(absent)], f"parts={','.join(parts)}")
    assert [name for name, status in found.items() if status == "left out"] == ["jobs"]
    assert found.keys() == set(parts)


def test_engines_without_an_environment_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LeftOut, match="make setup-vllm"):
        list(engines.run(GateSetting("cpu", tmp_path)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_run_under_every_schedule_and_costs_are_fitted(tmp_path: Path) -> None:
    assert gate(tmp_path, [], "parts=jobs,profile") == {"jobs": "passed", "profile": "passed"}
    checks = json.loads((tmp_path / "gate-gpu/cpu/jobs.json").read_text())["checks"]
    assert len(checks) == 7 and not [check for check in checks if "left out" in check["found"]]
    assert (tmp_path / "gate-gpu/cpu/costs/tiny_gate.yaml").is_file()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "tpu"}, "device=tpu is unknown; choose cpu or gpu"),
        ({"minutes": "soon"}, "minutes=soon is no number"),
    ],
)
def test_what_cannot_be_asked_of_the_gate_is_one_line(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        request(given)


def test_a_job_of_another_engine_takes_nothing_from_the_command_that_began_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".venv-vllm").mkdir()
    (tmp_path / ".venv-vllm/.installed").touch()
    (tmp_path / "Makefile").write_text(
        'bench:\n\t@test "$(ENGINE)" = vllm && test -z "$(DEVICE)$(findstring PARTS,$(MAKEOVERRIDES))"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAKEFLAGS", " -- PARTS=engines DEVICE=cpu")
    monkeypatch.setenv("DEVICE", "cpu")
    checks = {check.what: check for check in engines.run(GateSetting("cpu", tmp_path))}
    assert checks["vllm"].passed, checks["vllm"]
    assert "make setup-sglang" in checks["sglang"].found
