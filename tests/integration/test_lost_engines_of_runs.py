"""Whole runs in whose middle rollout engines are killed, leave and come back: real processes, real weights."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.comparison.promises import read_finished
from harness.metrics.done import is_done
from harness.metrics.run_files import load_ledger
from harness.report.summary import print_summary
from tests.support.invariants import check_dispatch, check_every_sample_once, check_lags, check_run, check_times
from tests.support.project import ROOT
from tests.support.real_runs import FIRST_TIMEOUT_S, SMALL, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(FIRST_TIMEOUT_S)]

SHORT = (
    f"{SMALL} iterations=5 algorithm.batch_groups=4 algorithm.group_size=4 algorithm.micro_batch_groups=2 task=expand "
    "engine.slots=8 cluster.wait_timeout_s=2000 cluster.on_lost_engine=go_on restarts.limit=0"
)
"""A wait that is not cut short lasts longer than the test may."""
TWO, THREE = (f"cluster.devices={n + 1} schedule.split.rollout={n}" for n in (2, 3))


@dataclass(frozen=True)
class Wanted:
    settings: str
    moments: list[tuple[str, str, int]]
    lost: list[str] = field(default_factory=list)


GO_ON = {
    "fully_async": Wanted(
        f"{SHORT} {THREE} schedule=fully_async",
        [("actor: batch 1", "dies", 0), ("actor: publishing version 3", "dies", 2)],
        ["rollout[0]", "rollout[2]"],
    ),
    "delayed_update": Wanted(
        f"{SHORT} {TWO} schedule=delayed_update", [("rollout 1: batch 2", "dies", 1)], ["rollout[1]"]
    ),
}
COMES_BACK = Wanted(
    f"{SHORT} {TWO} schedule=fully_async iterations=14 cluster.serve_membership=true",
    [("actor: batch 1", "leave", 1), ("rollout: rollout[1] has left", "join", 1)],
)
ENDS = {
    "end": Wanted(f"{SHORT} {TWO} schedule=fully_async cluster.on_lost_engine=end", [("actor: batch 1", "dies", 1)]),
    "the_last": Wanted(
        f"{SHORT} cluster.devices=2 schedule.split.rollout=1 schedule=one_step_off", [("rollout: batch 2", "dies", 0)]
    ),
}
ALL = GO_ON | {"comes_back": COMES_BACK} | ENDS


@dataclass(frozen=True)
class Made:
    """Each run's folder (of seed 0), exit code, and error if it ended early; looks: what the service told."""

    folders: dict[str, Path]
    codes: dict[str, int]
    errors: dict[str, str]
    looks: list[dict[str, Any]]
    output: str


@pytest.fixture(scope="module")
def made(results: Path) -> Made:
    runs = [{"settings": f"experiment=lost_{k} {w.settings}", "moments": w.moments} for k, w in ALL.items()]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/saboteur.py"), json.dumps(runs)],
        cwd=ROOT,
        env=environment(results),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=FIRST_TIMEOUT_S - 20,
        check=False,
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    ended = dict(zip(ALL, (line for line in told if "code" in line), strict=False))
    assert len(ended) == len(ALL), done.stdout[-8000:]
    folders = {name: folder for name in ALL for folder in (results / f"lost_{name}").glob("*/seed=0")}
    looks = [line["topology"] for line in told if "topology" in line]
    codes = {name: line["code"] for name, line in ended.items()}
    errors = {name: line.get("error", "") for name, line in ended.items()}
    return Made(folders, codes, errors, looks, done.stdout)


@pytest.mark.parametrize("name", list(GO_ON))
def test_the_run_goes_on_without_an_engine_that_was_killed(made: Made, name: str) -> None:
    assert made.codes[name] == 0, made.output[-8000:]
    run = read_finished(made.folders[name])
    if name == "delayed_update":  # what the dead one left may be sampled by newer weights than those of its batch
        check_every_sample_once(run)
        check_dispatch(run)
        check_times(run)
        check_lags(run, newer=True)
    else:
        check_run(run)
    events = load_ledger(made.folders[name])["engines"]
    assert [event["engine"] for event in events] == GO_ON[name].lost
    assert all(event["what"] == "lost" and event["at_s"] > 0 and event["engine"] in event["why"] for event in events)
    gone_at = {event["engine"]: event["at_s"] for event in events}
    assert not [s for s in run.trained if s.started_at > gone_at.get(f"rollout[{s.engine}]", s.started_at)]  # type: ignore


def test_the_summary_says_which_engine_was_lost_and_when(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    print_summary([made.folders["delayed_update"]], Console(width=80))
    assert " s: rollout[1] was lost, and the run went on without it: rollout[1] died during" in capsys.readouterr().out


def test_an_engine_leaves_over_http_and_comes_back_with_the_weights_of_that_moment(made: Made) -> None:
    assert made.codes["comes_back"] == 0, made.output[-8000:]
    folder = made.folders["comes_back"]
    run = read_finished(folder)
    check_run(run)
    events = {event["what"]: event["at_s"] for event in load_ledger(folder)["engines"]}
    assert list(events) == ["leaves", "left", "joins", "works"]
    its = [sample for sample in run.trained if sample.engine == "1"]
    assert its and not [s for s in its if events["left"] < s.started_at < events["works"]]  # type: ignore[operator]
    later = [s for s in its if s.started_at > events["works"]]  # type: ignore[operator]
    current = 1 + max(s.trained_iteration for s in run.trained if s.trained_at < events["works"])  # type: ignore
    assert later and min(s.version_first for s in later) >= current  # type: ignore[type-var]
    known = {member["name"]: member for look in made.looks for member in look["members"]}
    assert set(known) == {"rollout[0]", "rollout[1]"}
    for look, asked in zip(made.looks, ("leave", "join"), strict=True):
        assert look["members"][1]["requested"] in (asked, None)  # None: the run had it done before it was asked again
    assert not list(folder.glob("membership.json")), "the token is of no use any more"


def test_a_run_that_cannot_go_on_says_which_engine_died_over_what(made: Made) -> None:
    assert made.codes["end"] == 1 and not is_done(made.folders["end"])
    assert made.errors["end"].startswith("rollout[1] died during stream: ")
    assert made.codes["the_last"] == 1 and not is_done(made.folders["the_last"])
    assert "rollout[0] died during generate: " in made.errors["the_last"]
    assert "no engine is left to generate" in made.errors["the_last"]
