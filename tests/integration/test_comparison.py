"""Real comparisons: killed half-way, finished by the same command, and runs as they would be by themselves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.comparison.equivalence import differences, read_gate
from harness.comparison.experiment import comparison_of, read_campaign
from harness.metrics.run_files import load_manifest
from harness.report.page.document import document
from tests.support.project import ROOT
from tests.support.real_runs import BARE, SMALL, command, environment

WITHIN_S = 1200  # five short runs; on a quiet machine a minute

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * WITHIN_S)]

COMMAND = [
    *(sys.executable, "-m", "harness", "compare", "experiment=compared", "schedules=separated_sync,fully_async"),
    *("seeds=2", "iterations=4", "warmup_iterations=1", "model.warm_start=false", "loggers=[]", *BARE.split()),
    *("algorithm.batch_groups=4", "algorithm.group_size=4", "algorithm.micro_batch_groups=2"),
    "cluster.oversubscribe=true",
    "cluster.devices=2",
]


def done(folder: Path) -> dict[str, int]:
    """When each run was finished, in ns."""
    return {str(path.parent.relative_to(folder)): path.stat().st_mtime_ns for path in folder.glob("*/seed=*/DONE")}


def compare(results: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        COMMAND, cwd=ROOT, env=environment(results), capture_output=True, text=True, timeout=WITHIN_S, check=False
    )


def test_a_comparison_that_is_killed_is_finished_by_the_same_command(results: Path) -> None:
    folder = results / "compared"
    process = subprocess.Popen(
        COMMAND, cwd=ROOT, env=environment(results), stdout=subprocess.DEVNULL, start_new_session=True
    )
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + WITHIN_S
        while len(done(folder)) < 2 or not list(folder.glob("*/seed=1/metrics.jsonl")):
            assert process.poll() is None, f"it ended by itself with {process.returncode}"
            assert time.monotonic() < deadline, f"no third run within {WITHIN_S} s"
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=20)
    _, left = psutil.wait_procs(family, timeout=60)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE], "its run goes on without it"
    before = done(folder)
    again = compare(results)
    assert again.returncode == 0, again.stdout + again.stderr
    after = done(folder)
    assert len(after) == 4 and before.items() <= after.items(), "what was done is not run again"
    assert "equivalence gate passed" in again.stdout and "conservation passed: 4 ledgers close" in again.stdout
    gate = read_gate(folder)
    assert gate is not None and gate.passed and gate.samples == 96
    campaign = read_campaign(folder)
    comparison = comparison_of(folder, campaign)
    assert [cell.label for cell in comparison.cells] == ["separated_sync", "fully_async"]
    assert [cell.seeds for cell in comparison.cells] == [(0, 1), (0, 1)]
    assert document(comparison) == (folder / "report.html").read_text()


SPY = """
import hashlib, json, os, sys
from dataclasses import dataclass
from pathlib import Path
import torch
from harness.rl.advantages import group_advantages
from harness.config.registries import find

def report(who, **more):
    random = hashlib.sha256(torch.get_rng_state().numpy()).hexdigest()
    said = dict(os.environ) | {"threads": torch.get_num_threads(), "random": random, "folder": os.getcwd(), **more}
    with open(Path(os.environ["SPIED"]) / who, "a") as file:
        file.write(json.dumps(said) + "\\n")

@dataclass(frozen=True)
class Spied(find("schedule", "colocate_sync")):
    async def run(self, job):
        report("driver", arguments=sys.argv, imported=sorted(set(sys.path)))
        await super().run(job)

def advantages(rewards):
    report("worker")
    return group_advantages(rewards)
"""
SPIED = (
    *("schedule=spy:Spied", "algorithm.advantage=spy:advantages", "cluster.devices=1", "iterations=3"),
    *("warmup_iterations=1", "experiment=spied", *SMALL.split()),
)
COMPARED = """
import sys
from pathlib import Path
from rich.console import Console
from harness.cli.forked_runs import ForkedRuns
from harness.campaigns.cells import CellRequest, resolve_cell
from harness.campaigns.execution import Runs, run_cells
from harness.config.machine import this_machine
cell = resolve_cell(CellRequest("spied", tuple(sys.argv[2:])), this_machine())
with ForkedRuns() as runs:
    assert not run_cells(Runs((cell,), (0, 1), Path(sys.argv[1])), Console(), runs.start).failed
"""


OF_EACH = re.compile("CADENCE_RESULTS|SPIED|random|arguments|(MLFLOW|TORCHINDUCTOR|GIT)_.*")
"""What differs on purpose; and what packages set for themselves as they are imported."""


def as_seen(said: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in said.items() if not OF_EACH.fullmatch(name)}


def test_runs_of_a_comparison_are_bit_for_bit_what_they_are_by_themselves(tmp_path: Path) -> None:
    """The second of two forked drivers, against a command: results, and what drivers and workers see of their
    process."""
    (tmp_path / "spy.py").write_text(SPY)
    runs, said = {}, {}
    for name in ("compared", "alone"):
        results, spied = tmp_path / name, tmp_path / f"{name}_said"
        spied.mkdir()
        folders = os.pathsep.join([str(tmp_path), str(ROOT)])
        seen = environment(results) | {"PYTHONPATH": folders, "SPIED": str(spied), "OMP_NUM_THREADS": "2"}
        arguments = [sys.executable, "-c", COMPARED, str(results), *SPIED]
        each = arguments if name == "compared" else command(*SPIED, "seeds=[1]")
        done = subprocess.run(each, cwd=ROOT, env=seen, capture_output=True, text=True, timeout=WITHIN_S)
        assert done.returncode == 0, done.stdout + done.stderr
        runs[name] = sorted((results / "spied").glob("*/seed=?"))
        said[name] = {
            who: [json.loads(line) for line in (spied / who).read_text().splitlines()] for who in ("driver", "worker")
        }
    (alone,), (_, compared) = runs["alone"], runs["compared"]
    assert not differences(alone, compared)
    assert load_manifest(compared)["command"][:2] == load_manifest(alone)["command"][:2]
    randoms = {line["random"] for who in said["compared"].values() for line in who}
    assert len(randoms) == 4, "each process draws its own"
    for who in ("driver", "worker"):
        assert as_seen(said["compared"][who][-1]) == as_seen(said["alone"][who][-1])
