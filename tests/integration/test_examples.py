"""Code of one's own in examples/my_lab: a schedule, a reward and an agent loop, in runs as their pages have them."""

import subprocess
from pathlib import Path

import pytest

from harness.metrics.run_files import load_ledger
from tests.support.project import ROOT
from tests.support.real_runs import SMALL, command, environment


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        "schedule=my_lab.k_steps:KSteps schedule.k=2 task.reward=my_lab.rewards:brief task.reward_options.price=0.02",
        "task.generate=my_lab.agents:two_tries task.generate_options.second=0.3",
    ],
)
def test_code_of_ones_own_runs_where_it_lies(own: str, tmp_path: Path) -> None:
    settings = (*own.split(), *SMALL.split(), "iterations=2")
    done = subprocess.run(
        command(*settings), cwd=ROOT / "examples", env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.glob("bench/*/seed=0")
    assert load_ledger(folder)["trained"] == 256
