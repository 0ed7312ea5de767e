"""Real runs of which one process or another is killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support.project import ROOT
from tests.support.real_runs import command, environment

WITHIN_S = 240

Kill = tuple[str, int]
"""A process by its name, which is killed once so many iterations are written down: "host", "device[1]", "queue"."""


def run_killed(results: Path, experiment: str, settings: Sequence[str], kills: Sequence[Kill]) -> tuple[int, str]:
    """The exit code of `bench`, and all that it said. Raises TimeoutError where a process is not there to be killed."""
    process = subprocess.Popen(
        command(f"experiment={experiment}", "seeds=[0]", *settings),
        cwd=ROOT,
        env=environment(results),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for name, after in kills:
            _kill(process, name, lambda after=after: _lines(results, experiment) >= after)  # type: ignore[misc]
        said, _ = process.communicate(timeout=WITHIN_S)
        return process.returncode, said
    finally:
        process.kill()


def folder_of(results: Path, experiment: str) -> Path:
    (folder,) = (results / experiment).glob("*/seed=0")
    return folder


def _kill(run: subprocess.Popen[str], name: str, due: object) -> None:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if run.poll() is not None:
            said, _ = run.communicate()
            raise RuntimeError(f"the run ended before {name} could be killed:\n{said}")
        if due() and (found := _named(run.pid, name)):  # type: ignore[operator]
            os.kill(found[0], signal.SIGKILL)
            return
        time.sleep(0.01)
    raise TimeoutError(f"no process {name} to kill within {WITHIN_S} s")


def _named(run: int, name: str) -> list[int]:
    found = []
    for process in psutil.Process(run).children(recursive=True):
        try:
            queue = "harness.transfer_queue.remote.process" in process.cmdline()
            if process.name() == name or (queue and name == "queue"):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def _lines(results: Path, experiment: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in results.glob(f"{experiment}/*/seed=0/metrics.jsonl"))
