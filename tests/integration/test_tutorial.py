"""docs/tutorial.md: its commands, in its order, with the schedule that it writes down."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import make_lab
from tests.support.project import ROOT

SHORT = "--iterations 8 warmup_iterations=2"
"""In place of the page's numbers: what is tried is that its commands go through and show what it says they do."""
COMMAND = re.compile(r"^    cadence (.*?)(?: +# refused: (.*))?$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_commands_of_the_tutorial_do_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    make_lab(tmp_path)
    for words, refusal in COMMAND.findall(page):
        if not words.startswith("report"):
            untaught = "" if "virtual" in words else " model.warm_start=false"
            words = re.sub(r" --iterations \d+", "", words) + f" {SHORT}{untaught}"
        done = subprocess.run(
            [sys.executable, "-m", "harness", *shlex.split(words)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        said = done.stdout + done.stderr
        assert (done.returncode != 0) == bool(refusal) and refusal in said, (words, said[-4000:])
    results = tmp_path / "results"
    for shown in ("bench/*/seed=0/gantt.png", "bench/*/seed=0/trace.json", "bench/report.html"):
        assert list(results.glob(shown)), shown
    (report,) = results.glob("compare-*/report.md")
    assert "my_lab.k_steps:KSteps" in report.read_text(encoding="utf-8")
