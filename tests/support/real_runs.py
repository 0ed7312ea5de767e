"""Real runs through the command line: the settings of short ones, and how they are made."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.comparison.equivalence import timeless
from harness.metrics.parquet import read_as
from harness.metrics.run_files import load_ledger, weight_files
from harness.metrics.samples import RESPONSES_SCHEMA, read_samples
from tests.support.project import ROOT

RUN_TIMEOUT_S = 840
FIRST_TIMEOUT_S = 1500
"""Of a test that may be the first to ask for a row of runs, and waits for all of them."""

STARTED_WITHIN_S = 540
"""On a cluster each process imports all by itself, which has taken over 200 s on two cores that others used too."""

ENDED_WITHIN_S = 240

BARE = "algorithm.recompute_log_probs=false"
"""Without the role that only measures."""
SMALL = f"backend=real cluster.oversubscribe=true model.warm_start=false smoke=true loggers=[] {BARE}"
"""From random weights, so that no warm start is needed; rewards are rare, not absent, and updates move the weights.
Without MLflow, which takes seconds to load and has tests of its own."""
SEVERAL_TURNS = "iterations=4 task=lookup task.latency_s=0.005 algorithm.recompute_log_probs=true"
"""Beside SMALL: samples whose environment answers between their turns, and is read by the role that recomputes."""


def environment(results: Path) -> dict[str, str]:
    return os.environ | {"CADENCE_RESULTS": str(results)}


def command(*settings: str) -> list[str]:
    return [sys.executable, "-m", "harness", "bench", *settings]


def bench(results: Path, experiment: str, *settings: str) -> Path:
    """Runs `python -m harness bench` with these settings and returns the folder of seed 0."""
    _run(command(f"experiment={experiment}", "seeds=[0]", *settings), results, RUN_TIMEOUT_S)
    (folder,) = (results / experiment).glob("*/seed=0")
    return folder


def lines(results: Path, experiment: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in results.glob(f"{experiment}/*/seed=0/metrics.jsonl"))


def killed(
    results: Path, experiment: str, settings: tuple[str, ...], after: int, how: signal.Signals
) -> tuple[int, str]:
    """Begun, and sent a signal after so many iterations. Its exit code, and what it said."""
    arguments = command(f"experiment={experiment}", *settings)
    taken = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment(results), text=True, **taken)
    wait_for_lines(results, experiment, after, process)
    process.send_signal(how)
    said, _ = process.communicate(timeout=ENDED_WITHIN_S)
    return process.returncode, said


def wait_for_lines(results: Path, experiment: str, count: int, process: subprocess.Popen[Any]) -> None:
    """Until so many iterations are written, or the process has ended. Kills it where it should have begun long ago."""
    deadline = time.monotonic() + STARTED_WITHIN_S
    while lines(results, experiment) < count and process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            said, _ = process.communicate()
            pytest.fail(f"no {count} iterations within {STARTED_WITHIN_S} s: {said or ''}{logs(results, since=0)}")
        time.sleep(0.02)


def _run(arguments: list[str], results: Path, timeout_s: float) -> None:
    begun = time.time()
    how = {"capture_output": True, "text": True, "timeout": timeout_s, "check": False}
    done: Any = subprocess.run(arguments, cwd=ROOT, env=environment(results), **how)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:] + logs(results, begun)


def logs(results: Path, since: float) -> str:
    """The ends of what the processes of runs have said since then."""
    logs = [log for log in sorted(results.rglob("*.log")) if log.stat().st_mtime >= since]
    return "".join(f"\n-- {log.relative_to(results)}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def check_equal(broken: Path, whole: Path) -> None:
    """Bit for bit, but for rewards of what was dropped."""
    (ours,), (theirs,) = weight_files(broken), weight_files(whole)
    assert ours.read_bytes() == theirs.read_bytes()
    responses = [read_as(folder / "responses.parquet", RESPONSES_SCHEMA) for folder in (broken, whole)]
    assert responses[0].equals(responses[1])
    names = ("sample_id", "fate", "reward", "trained_iteration", "version_first", "version_last", "lag_worst")
    columns = [timeless(read_samples(folder / "samples.parquet")).select(names) for folder in (broken, whole)]
    assert columns[0].equals(columns[1])
    unlike = {"restarts": [], "tokens": {}}  # a process that died takes its count of tokens along
    assert load_ledger(broken) | unlike == load_ledger(whole) | unlike
