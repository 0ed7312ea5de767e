"""Real runs through the command line, each made once and looked at by many tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 280

Bench = Callable[..., Path]


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
        assert done.returncode == 0, done.stdout + done.stderr
        (folder,) = (results / experiment).glob(f"*/seed={seed}")
        return folder

    return run
