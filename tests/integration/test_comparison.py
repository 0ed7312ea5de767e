"""A real comparison of two schedules: killed half-way, finished by the same command, the same whenever it is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.comparison.equivalence import read_gate
from harness.comparison.experiment import comparison_of, read_campaign
from tests.support.project import ROOT
from tests.support.real_runs import BARE, environment

WITHIN_S = 1200  # seven short runs; on a quiet machine two minutes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * WITHIN_S)]

COMMAND = [
    *(sys.executable, "-m", "harness", "compare", "experiment=compared", "schedules=separated_sync,fully_async"),
    *("seeds=2", "iterations=4", "warmup_iterations=1", "model.warm_start=false", *BARE.split()),
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

    first = (folder / "report.html").read_text()
    once_more = compare(results)
    assert once_more.returncode == 0, once_more.stdout + once_more.stderr
    assert done(folder) == after and (folder / "report.html").read_text() == first
    campaign = read_campaign(folder)
    assert campaign is not None
    comparison = comparison_of(folder, campaign)
    assert [cell.label for cell in comparison.cells] == ["separated_sync", "fully_async"]
    assert [cell.seeds for cell in comparison.cells] == [(0, 1), (0, 1)]
