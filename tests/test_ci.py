"""When .ci/run asks tests a second time."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.project import ROOT

ABORTED = "E   RuntimeError: process 1 died without a word, exit code -6\nERROR tests/a.py::test_b - RuntimeError\n"
WRONG = "E   assert 1 == 2\nFAILED tests/a.py::test_b - assert 1 == 2\n"
MAKE = """#!/bin/sh
echo "$@" >>calls
cat "says-$(wc -l <calls)"
exit "$(cat "exits-$(wc -l <calls)")"
"""


@pytest.mark.parametrize(
    ("says", "exits", "code", "named"),
    [
        (["4296 passed\n"], [0], 0, ""),
        ([WRONG], [2], 1, ""),
        ([ABORTED, "26 passed\n"], [2, 0], 0, "ERROR tests/a.py::test_b - RuntimeError\n"),
        ([ABORTED, ABORTED], [2, 2], 1, ""),
        ([WRONG + ABORTED, WRONG], [2, 2], 1, ""),
    ],
    ids=["passed", "wrong", "aborted once", "aborted twice", "wrong beside it"],
)
def test_only_beside_an_abort_and_once(
    says: list[str], exits: list[int], code: int, named: str, tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "tests", tmp_path / ".ci")
    for number, (said, exit_code) in enumerate(zip(says, exits, strict=True), start=1):
        (tmp_path / f"says-{number}").write_text(said)
        (tmp_path / f"exits-{number}").write_text(str(exit_code))
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    names = tmp_path / "names"
    names.touch()
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "ABORTED": str(names)}
    done = subprocess.run([tmp_path / ".ci" / "tests", "test", "--x"], env=environment, check=False)
    assert done.returncode == code
    first, again = "--keep-going test ARGS=--x", "--keep-going test ARGS=--x --last-failed"
    assert (tmp_path / "calls").read_text().splitlines() == [first, again][: len(says)]
    assert names.read_text() == named
