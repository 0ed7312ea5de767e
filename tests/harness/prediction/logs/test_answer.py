"""What is answered to a log: which schedule, split and staleness, how surely, and the command."""

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.config.compose import compose_job
from harness.prediction.logs.answer import answer, as_markdown, candidates, sentence
from harness.prediction.logs.read import read_log

WRITTEN = Path(__file__).parent / "written"
BATCH = ("algorithm.batch_groups=64", "algorithm.group_size=8")
SAID: dict[str, tuple[str, ...]] = {
    "verl.log": (),
    "prime_rl.jsonl": ("model=qwen7b", "device=h100", "cluster.devices=32", "schedule.split.rollout=16", BATCH[1]),
    "trl_trainer_state.json": ("model=qwen7b", "device=h100", "cluster.devices=16", *BATCH),
}


@pytest.mark.parametrize("name", SAID)
def test_one_log_is_enough_for_an_answer(name: str) -> None:
    read = read_log([WRITTEN / name], SAID[name])
    found = answer(read, draws=4)
    medians = [one.median for one in found.forecasts]
    assert medians == sorted(medians) and len({one.row.schedule for one in found.forecasts}) == len(medians) == 3
    for one in found.forecasts:
        low, high = one.interval()
        assert low <= one.median <= high and one.row.devices == read.row.devices
        assert one.reference_s == pytest.approx(np.full(4, read.row.step_s))  # of the log, not of the simulation
    assert (found.own is None) == read.row.synchronous
    page = as_markdown(found)
    assert sentence(found) in page and found.command in page and all(note in page for note in read.notes)
    alike = tuple(replace(one, step_s=one.reference_s / 1.01) for one in found.forecasts)
    assert sentence(replace(found, forecasts=alike)).startswith("A tie: ")
    assert found.command.startswith("cadence bench schedule=") and "model=qwen7b device=h100" in found.command
    compose_job(shlex.split(found.command)[2:])


def test_candidates_split_the_devices_of_the_run_into_whole_engines() -> None:
    run = read_log([WRITTEN / "verl.log"]).row
    rows = candidates(run, 4)
    assert {row.devices for row in rows} == {16} and all(row.rollout_devices % 4 == 0 for row in rows)
    assert {row.rollout_devices for row in rows if row.schedule == "half_step"} == {8, 12}  # at least two cohorts
