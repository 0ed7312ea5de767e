"""What pages show: the commands of docs/tutorial.md, in their order, with the schedule that it writes down; the engine
of docs/adding_an_engine.md under the contract; examples/service, whose trainer and engines know nothing of Cadence."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from harness.cli.forked_runs import DRIVER_PRELOAD
from harness.cli.main import main
from harness.driver import PRELOAD
from harness.runtime.local_runtime import launch_server
from tests.support.lab import make_lab
from tests.support.project import ROOT, python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SHORT = (
    "--iterations 4 warmup_iterations=1 algorithm.batch_groups=4 algorithm.group_size=4 algorithm.micro_batch_groups=2"
)
"""In place of the page's numbers: what is tried is that its commands go through and show what it says they do."""
COMMAND = re.compile(r"^    cadence (.*?)(?: +# refused: (.*))?$", re.MULTILINE)


def typed(words: list[str], folder: Path) -> None:
    """`python -m harness` in this folder, in a process that has imported most of it."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.exit(main(words))


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
            assert process.wait(LIMIT_S) is not None, words
            said = log.read_text(encoding="utf-8")
            assert (process.code != 0) == bool(refusal) and refusal in said, (words, said[-4000:])
    results = tmp_path / "results"
    for shown in ("bench/*/seed=0/gantt.png", "bench/*/seed=0/trace.json", "bench/report.html"):
        assert list(results.glob(shown)), shown
    (report,) = results.glob("compare-*/report.md")
    assert "my_lab.k_steps:KSteps" in report.read_text(encoding="utf-8")


ITSELF = ("--ignore", "tests/contract/test_contract_suite.py")
"""Tests of the contract's tests, which are the same whatever the engine."""


def test_the_engine_of_the_page_keeps_the_contract() -> None:
    arguments = ("-m", "pytest", "tests/contract", "--engine", "my_lab.engine:MyEngine", *ITSELF, "-q")
    done = python(*arguments, env=os.environ | {"PYTHONPATH": str(ROOT / "examples")})
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " failed" not in done.stdout and " passed" in done.stdout


LIMIT_S = 600
EXAMPLE = ROOT / "examples" / "service"


@contextmanager
def started(*command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone afterwards, and what it had in the temporary folder."""
    environment = os.environ | variables | {"PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()


def test_a_foreign_trainer_and_foreign_engines_learn_over_http_within_the_bound() -> None:
    with started("-m", "harness", "serve", "port=0", CADENCE_TOKEN="a token") as service:
        told = service.stdout.readline()
        url = next(word for word in told.split() if word.startswith("http://127.0.0.1:"))
        variables = {"CADENCE_URL": url, "CADENCE_TOKEN": "a token"}
        trainer = started(f"{EXAMPLE}/trainer.py", "40", "2", "a", "b", **variables)
        with trainer as trains, started(f"{EXAMPLE}/engine.py", "a", **variables) as a:
            with started(f"{EXAMPLE}/engine.py", "b", **variables) as b:
                said, _ = trains.communicate(timeout=LIMIT_S)
                ended = [engine.communicate(timeout=LIMIT_S)[0] for engine in (a, b)]
    assert (trains.returncode, a.returncode, b.returncode) == (0, 0, 0), [said, *ended]
    *batches, ledger = said.splitlines()
    rewards = [float(line.rpartition(" ")[2]) for line in batches]
    assert len(rewards) == 40 and sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.8
    found = json.loads(ledger.replace("'", '"'))
    assert found["loaded"] == found["trained"] == 40 * 128 and found["generated_untrained"] == 0
    lags = {int(lag): rows for lag, rows in found["lags"].items()}
    assert sum(lags.values()) == 40 * 128 and max(lags) <= 2 == found["worst_lag"]
