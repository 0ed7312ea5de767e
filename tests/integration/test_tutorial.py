"""docs/tutorial.md: its commands, in its order, with the schedule that it writes down."""

import os
import re
import shlex
import sys
from contextlib import closing
from pathlib import Path

import pytest

from harness.cli.forked_runs import DRIVER_PRELOAD
from harness.cli.main import main
from harness.driver import PRELOAD
from harness.runtime.local_runtime import launch_server
from tests.support.lab import make_lab
from tests.support.project import ROOT

SHORT = "--iterations 8 warmup_iterations=2"
"""In place of the page's numbers: what is tried is that its commands go through and show what it says they do."""
COMMAND = re.compile(r"^    cadence (.*?)(?: +# refused: (.*))?$", re.MULTILINE)
WITHIN_S = 600.0


def typed(words: list[str], folder: Path) -> None:
    """`python -m harness` in this folder, in a process that has imported most of it."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.exit(main(words))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_commands_of_the_tutorial_do_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    make_lab(tmp_path)
    with closing(launch_server((*PRELOAD, *DRIVER_PRELOAD))) as server:
        for number, (words, refusal) in enumerate(COMMAND.findall(page)):
            if not words.startswith("report"):
                untaught = "" if "virtual" in words else " model.warm_start=false"
                words = re.sub(r" --(iterations|seeds) \d+", "", words) + f" {SHORT}{untaught}"
                words += " --seeds 2" * words.startswith("compare")
            log = tmp_path / f"{number}.log"
            process = server.start(typed, (shlex.split(words), tmp_path), log=log)
            assert process.wait(WITHIN_S) is not None, words
            said = log.read_text(encoding="utf-8")
            assert (process.code != 0) == bool(refusal) and refusal in said, (words, said[-4000:])
    results = tmp_path / "results"
    for shown in ("bench/*/seed=0/gantt.png", "bench/*/seed=0/trace.json", "bench/report.html"):
        assert list(results.glob(shown)), shown
    (report,) = results.glob("compare-*/report.md")
    assert "my_lab.k_steps:KSteps" in report.read_text(encoding="utf-8")
