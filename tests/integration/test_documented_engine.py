"""The engine that docs/adding_an_engine.md writes down passes the contract, by the command that it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import ROOT

PAGE = ROOT / "docs" / "adding_an_engine.md"
ITSELF = ("--ignore", "tests/contract/test_contract_suite.py")
"""Tests of the contract's tests, which are the same whatever the engine."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_engine_on_the_page_keeps_the_contract(tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_engine.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/contract", "--engine", "my_engine:MyEngine", *ITSELF, "-q"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " failed" not in done.stdout and " passed" in done.stdout
