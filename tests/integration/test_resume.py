"""A run whose driver is killed, and the same command again."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from random import Random

import pytest

from harness.metrics.run_files import load_ledger, load_manifest, load_metrics, weight_files
from harness.metrics.samples import read_responses, read_samples
from tests.support.invariants import check_run, read_run
from tests.support.project import ROOT
from tests.support.real_runs import SMALL, bench, command, environment

pytestmark = pytest.mark.slow

ITERATIONS = 10
SETTINGS = (*SMALL.split(), f"iterations={ITERATIONS}", "checkpoint.every=2", "seeds=[0]")
STARTED_WITHIN_S = 240
REPEATABLE = (
    "schedule=colocate_sync cluster.devices=2",
    "schedule=colocate_sync cluster.devices=1 algorithm=ppo",
    "schedule=separated_sync cluster.devices=2",
    "schedule=one_step_off cluster.devices=2",
    "schedule=k_step_off cluster.devices=2",
    "schedule=delayed_update cluster.devices=3",
    "schedule=fully_async cluster.devices=2 schedule.max_staleness=0",
)
OTHERS = ("schedule=fully_async cluster.devices=2", "schedule=half_step cluster.devices=4")


def lines(results: Path, experiment: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in results.glob(f"{experiment}/*/seed=0/metrics.jsonl"))


def killed(results: Path, experiment: str, settings: tuple[str, ...], when: Random) -> None:
    """Begun, and ended by a signal that nothing can be done about, at some moment after two checkpoints were begun."""
    arguments, after = command(f"experiment={experiment}", *settings), when.randint(5, 8)
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=environment(results), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + STARTED_WITHIN_S
    while lines(results, experiment) < after and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def resumed(results: Path, settings: str) -> Path:
    told = (*SETTINGS, *settings.split())
    killed(results, "broken", told, Random(settings))
    folder = bench(results, "broken", *told)
    began = load_manifest(folder)["resumed"]
    assert began and 2 <= began[0] < ITERATIONS
    assert [line["iteration"] for line in load_metrics(folder)] == list(range(ITERATIONS))
    return folder


@pytest.mark.parametrize("settings", REPEATABLE)
def test_what_was_killed_ends_bit_for_bit_as_what_was_not(settings: str, tmp_path: Path) -> None:
    broken = resumed(tmp_path, settings)
    whole = bench(tmp_path, "whole", *SETTINGS, *settings.split())
    (ours,), (theirs,) = weight_files(broken), weight_files(whole)
    assert ours.read_bytes() == theirs.read_bytes()
    assert read_responses(broken / "responses.parquet").equals(read_responses(whole / "responses.parquet"))
    names = ("sample_id", "fate", "reward", "trained_iteration", "version_first", "version_last", "lag_worst")
    columns = [read_samples(folder / "samples.parquet").select(names) for folder in (broken, whole)]
    assert columns[0].equals(columns[1])
    assert load_ledger(broken) == load_ledger(whole)


@pytest.mark.parametrize("settings", OTHERS)
def test_where_order_of_arrival_decides_bounds_and_ledger_hold(settings: str, tmp_path: Path) -> None:
    check_run(read_run(resumed(tmp_path, settings)))
