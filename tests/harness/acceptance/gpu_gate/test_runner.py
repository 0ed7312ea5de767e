"""The gate's runner, with parts of a few lines: what hangs, crashes or is left out is named, and the others go on."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from harness.acceptance.gpu_gate.gate import PARTS, GatePart, chosen, run_gate
from harness.acceptance.gpu_gate.gate import run as run_whole
from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts import engines
from harness.acceptance.gpu_gate.results import (
    GATE,
    REPORT,
    LeftOut,
    PartResult,
    exit_status,
    read_result,
    summary,
    write_report,
)
from harness.cli.costs import calibrate
from harness.config import ConfigError
from harness.config.registries import SCHEDULES
from tests.support.bare_machine import bare_environment
from tests.support.project import ROOT, python

HEAD = """import os, sys, time
from dataclasses import replace
from harness.acceptance.gpu_gate.results import Check, Figure, LeftOut

def run(setting):
"""
BODIES = {
    "fine": "    yield Check('sum', f'{1 + 1} on {setting.kind}')\n",
    "wrong": "    yield Check('sum', '3', passed=False)\n    yield Check('product', '1')\n",
    "raises": "    yield Check('first', '1')\n    raise RuntimeError('no such kernel\\nsecond line')\n",
    "hangs": "    yield Check('first', '1')\n    print('waiting for nobody', flush=True)\n    time.sleep(3600)\n",
    "crashes": "    yield Check('first', '1')\n    print('about to die', flush=True)\n    os._exit(7)\n",
    "killed": "    yield Check('first', '1')\n    os.kill(os.getpid(), 9)\n",
    "pieces": """
    for name in ('first', 'second'):
        if name not in setting.kept:
            setting.require_time(20.0)
            yield Check(name, 'seen')
            setting = replace(setting, until=0.0)
""",
    "figures": """
    yield Check('speed', '2', figures=(Figure('copies', 2e9, 'B/s', 4e9, 1e9), Figure('tokens', 3, 'token/s')))
    yield Check('7B', 'no room', left_out=True)
""",
    "absent": "    import no_such_package\n    yield\n",
    "unfit": "    raise LeftOut('two devices are needed')\n    yield\n",
    "parent": "    import subprocess\n    child = subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
    "    print(child.pid, flush=True)\n    time.sleep(3600)\n    yield\n",
}


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GatePart]:
    """Makes a part by the name of its body."""
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(code), os.environ.get("PYTHONPATH", os.getcwd())]))

    def make(name: str, limit_s: float = 60.0) -> GatePart:
        (code / f"part_{name}.py").write_text(HEAD + BODIES[name])
        return GatePart(name, name, f"part_{name}", limit_s)

    return make


def test_a_part_in_pieces_goes_on_where_the_last_command_stopped(part: Callable[..., GatePart], tmp_path: Path) -> None:
    pieces = replace(part("pieces"), in_pieces=True)
    first = run(tmp_path, pieces, seconds=600.0)["pieces"]
    assert first.status == "unfinished" and [check.what for check in first.checks] == ["first"]
    assert exit_status([first], []) == (3, "exit status 3: nothing failed; not asked: pieces")
    second = run(tmp_path, pieces, seconds=600.0)["pieces"]
    assert second.status == "passed" and [check.what for check in second.checks] == ["first", "second"]


def test_a_part_says_in_a_line_which_wheels_it_needs(part: Callable[..., GatePart], tmp_path: Path) -> None:
    found = run(tmp_path, replace(part("fine"), needs=("numpy", "nowhere", "antlr5-python3-runtime")))["fine"]
    assert (found.status, found.why.partition(" (")[0]) == ("left out", "needs nowhere antlr5-python3-runtime")


def test_the_page_has_figures_against_device_and_cost_model(part: Callable[..., GatePart], tmp_path: Path) -> None:
    found = list(run(tmp_path, part("figures"), part("wrong")).values())
    page = write_report(tmp_path, "cpu", found, ["jobs"]).read_text()
    assert (
        "| copies | 2 GB/s | 4 GB/s | 50% | 1 GB/s | 200% |" in page
        and "| tokens | 3 token/s | - | - | - | - |" in page
    )
    assert "- -- figures, 7B: no room" in page and "- NO wrong, sum: 3" in page
    assert exit_status(found, ["jobs"]) == (1, "exit status 1: wrong did not pass")
    assert exit_status(found[:1], ["jobs"])[1] == "exit status 3: nothing failed; not asked: figures: 7B, jobs"
    kept = json.loads((tmp_path / GATE).read_text())
    assert (
        kept["status"] == 1 and kept["parts"][0]["checks"][0]["figures"][0]["card"] == 4e9 and kept["profile"] is None
    )


def run(folder: Path, *parts: GatePart, force: bool = False, seconds: float | None = None) -> dict[str, PartResult]:
    return {found.part: found for found in run_gate(parts, "cpu", folder, force=force, seconds=seconds)}


def test_every_part_runs_whatever_became_of_those_before_it(part: Callable[..., GatePart], tmp_path: Path) -> None:
    names = ["crashes", "killed", "wrong", "raises", "absent", "unfit", "fine"]
    found = run(tmp_path, *map(part, names))

    assert {name: found[name].status for name in names} == {
        "crashes": "crashed",
        "killed": "crashed",
        "wrong": "failed",
        "raises": "failed",
        "absent": "left out",
        "unfit": "left out",
        "fine": "passed",
    }
    assert "exit code 7" in found["crashes"].why and "about to die" in found["crashes"].why
    assert "SIGKILL" in found["killed"].why and found["killed"].checks, "what was found before is kept"
    assert found["wrong"].why == "sum" and len(found["wrong"].checks) == 2
    assert found["raises"].why == "RuntimeError: no such kernel"
    assert "no_such_package" in found["absent"].why and found["unfit"].why == "two devices are needed"
    assert found["fine"].checks[0].found == "2 on cpu"
    assert exit_status(list(found.values()), [])[0] == 1
    assert exit_status([found["fine"], found["unfit"]], [])[0] == exit_status([found["unfit"]], [])[0] == 3
    assert exit_status([found["fine"]], []) == (0, "")
    page = write_report(tmp_path, "cpu", list(found.values())).read_text()
    assert "did not pass" in page and "NO wrong, sum: 3" in page and (tmp_path / REPORT).exists()
    assert summary([found["fine"], found["unfit"]]).startswith("1 of 2 parts passed, 1 left out (unfit)")


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_that_it_started(part: Callable[..., GatePart], tmp_path: Path) -> None:
    found = run(tmp_path, part("hangs", limit_s=5.0), part("parent", limit_s=5.0), part("fine"))
    assert found["hangs"].status == "timed out" and "waiting for nobody" in found["hangs"].why
    assert found["hangs"].checks and found["fine"].status == "passed"
    child = int((tmp_path / "parent.log").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_second_call_goes_on_with_what_is_missing(part: Callable[..., GatePart], tmp_path: Path) -> None:
    fine, wrong, unfit = part("fine"), part("wrong"), part("unfit")
    assert run(tmp_path, fine, wrong, seconds=59.0) == {}, "no part is begun that could last longer than is left"
    run(tmp_path, fine, wrong, unfit)
    anew = "    yield Check('sum', 'anew')\n"
    for name in ("fine", "wrong", "unfit"):
        (tmp_path / "code" / f"part_{name}.py").write_text(HEAD + anew)
    kept = run(tmp_path, fine, wrong, unfit)
    assert [kept[name].status for name in ("fine", "wrong", "unfit")] == ["passed", "failed", "passed"]
    assert kept["fine"].checks[0].found == "2 on cpu", "what was left out is asked again, what ran is kept"
    assert run(tmp_path, fine, force=True)["fine"].checks[0].found == "anew"


def test_a_part_whose_gate_was_interrupted_is_run_again(part: Callable[..., GatePart], tmp_path: Path) -> None:
    fine = part("fine")
    run(tmp_path, fine)
    path = tmp_path / "fine.json"
    path.write_text(path.read_text().replace('"passed"', '"running"', 1))
    found = read_result(tmp_path, "fine")
    assert found is not None and found.status == "running"
    assert run(tmp_path, fine)["fine"].status == "passed"


def test_parts_are_chosen_by_name_in_the_order_of_the_gate(part: Callable[..., GatePart]) -> None:
    parts = [part("fine"), part("wrong"), part("unfit")]
    assert [each.name for each in chosen(parts, ["unfit", "fine"])] == ["fine", "unfit"]
    assert chosen(parts, []) == parts
    with pytest.raises(ConfigError, match="no part speed; choose from fine, wrong, unfit"):
        chosen(parts, ["speed"])


def gate(folder: Path, environment: dict[str, str], *arguments: str, status: int = 0) -> dict[str, PartResult]:
    """What each part found, and the gate's own exit status has to be this."""
    arguments = ("-m", "harness.acceptance.gpu_gate", "device=cpu", f"results={folder}", *arguments)
    done = python(*arguments, cwd=folder, env=environment, timeout_s=1780)
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
def test_what_cannot_be_asked_of_the_gate_is_one_line(given: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run_whole(given, tmp_path, print)


def test_a_job_of_another_engine_takes_none_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
