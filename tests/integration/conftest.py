"""Real runs through the command line, each made once and looked at by many tests.

Most of a short run is its start: importing, and bringing processes up. So short runs are made by one process, in a row,
and without the reference and old log-probs where nothing is asked of these.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.project import ROOT

RUN_TIMEOUT_S = 280
FIRST_TIMEOUT_S = 1500
"""Of a test that may be the first to ask for a row of runs, and waits for all of them."""

Bench = Callable[..., Path]
BenchAll = Callable[[Mapping[str, str]], dict[str, Path]]

BARE = "algorithm.reference=false algorithm.recompute_log_probs=false"
"""Without the two roles that only measure: five processes instead of seven."""
SMALL = f"backend=real cluster.oversubscribe=true model.warm_start=false smoke=true {BARE}"
"""From random weights, so that no warm start is needed; rewards are rare, not absent, and updates move the weights."""

DRAINED = (
    "schedule=fully_async schedule.max_staleness=0.5 schedule.partial=false algorithm.correction=tis "
    "algorithm.kl_coef=0.01 task=expand model.warm_start=false iterations=6 smoke=true"
)
"""Half a batch ahead, engines drained before each update, TIS, and a KL to the reference in the loss."""

_ALL = """
import sys
from harness.cli.main import main
for settings in sys.argv[1:]:
    code = main(["bench", *settings.split()])
    if code:
        sys.exit(f"{settings}: exit code {code}")
"""


def environment(results: Path) -> dict[str, str]:
    return os.environ | {"CADENCE_RESULTS": str(results)}


def command(*settings: str) -> list[str]:
    return [sys.executable, "-m", "harness", "bench", *settings]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One results folder for all tests: the warm start and MLflow's database are made once."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="session")
def bench(results: Path) -> Bench:
    """Runs `python -m harness bench` with these settings and returns the folder of its seed."""

    def run(experiment: str, *settings: str, seed: int = 0) -> Path:
        told = command(f"experiment={experiment}", f"seeds=[{seed}]", *settings)
        done = subprocess.run(
            told, cwd=ROOT, env=environment(results), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        (folder,) = (results / experiment).glob(f"*/seed={seed}")
        return folder

    return run


@pytest.fixture(scope="session")
def bench_all(results: Path) -> BenchAll:
    """Runs `bench` with the settings of every experiment, and returns the folder of each one's seed 0."""

    def run(settings: Mapping[str, str]) -> dict[str, Path]:
        told = [f"experiment={experiment} {its}" for experiment, its in settings.items()]
        done = subprocess.run(
            [sys.executable, "-c", _ALL, *told],
            cwd=ROOT,
            env=environment(results),
            capture_output=True,
            text=True,
            timeout=FIRST_TIMEOUT_S - 20,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        return {experiment: folder for experiment in settings for folder in (results / experiment).glob("*/seed=0")}

    return run


@pytest.fixture(scope="session")
def fresh(bench_all: BenchAll) -> dict[str, Path]:
    """Runs in which no sample may lag, on a training world of one: they have to be equal to the bit."""
    return bench_all(
        {
            "colocated": f"{SMALL} iterations=4 schedule=colocate_sync cluster.devices=1 seeds=[0,1]",
            "colocated_again": f"{SMALL} iterations=4 schedule=colocate_sync cluster.devices=1",
            "separated": f"{SMALL} iterations=4 schedule=separated_sync schedule.streaming=false",
            "separated_streaming": f"{SMALL} iterations=4 schedule=separated_sync schedule.streaming=true",
            "async_0": f"{SMALL} iterations=4 schedule=fully_async schedule.max_staleness=0",
        }
    )


@pytest.fixture(scope="session")
def ahead(bench_all: BenchAll) -> dict[str, Path]:
    """Runs in which samples may lag, one of every schedule and option that bounds it in its own way."""
    short = f"{SMALL} iterations=5 algorithm.batch_groups=4 algorithm.group_size=4 algorithm.micro_batch_groups=2"
    completion = f"{short} schedule=fully_async schedule.order=completion task=expand engine.slots=8"
    return bench_all(
        {
            "one_step_off": f"{short} schedule=one_step_off",
            "k_step_off": f"{short} schedule=k_step_off",
            "delayed_update": f"{short} schedule=delayed_update",
            "half_step": f"{short} schedule=half_step cluster.devices=3 schedule.split.rollout=2",
            "completion_wait": f"{completion} schedule.max_staleness=1",
            "completion_drop": f"{completion} schedule.max_staleness=0.5 schedule.on_stale=drop",
            "drained": DRAINED,
        }
    )
