"""The engine that docs/adding_an_engine.md shows passes the contract, by the command that it names."""

import os
import subprocess
import sys

import pytest

from tests.support.project import ROOT

ITSELF = ("--ignore", "tests/contract/test_contract_suite.py")
"""Tests of the contract's tests, which are the same whatever the engine."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_engine_of_the_page_keeps_the_contract() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/contract", "--engine", "my_lab.engine:MyEngine", *ITSELF, "-q"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "examples")},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " failed" not in done.stdout and " passed" in done.stdout
