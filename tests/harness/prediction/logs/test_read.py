"""Logs in the formats of those who write them (`written/`, made for this: no real runs), and what they are read as."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.config import ConfigError
from harness.config.compose import compose_job
from harness.planner.plan import plan_jobs
from harness.prediction.evidence import StepRow, Workload
from harness.prediction.logs.answer import answer, as_markdown, candidates, sentence
from harness.prediction.logs.read import PHASES, ReadLog, read_log

WRITTEN = Path(__file__).parent / "written"
EVENTS = "events.out.tfevents.1700000000.node.1.0"
ALONE = ("model=qwen7b", "device=h100", "cluster.devices=16")
APART = ("model=qwen7b", "device=h100", "cluster.devices=32", "schedule.split.rollout=16", "algorithm.group_size=8")
BATCH = ("algorithm.batch_groups=64", "algorithm.group_size=8")
LOGS: dict[str, tuple[tuple[str, ...], str, tuple[int, int], dict[str, float]]] = {
    # what has to be said besides, what ran, on which devices, and seconds of which phases, within 3 %
    "verl.log": ((), "colocate_sync", (16, 16), {"rollout_s": 61, "old_log_prob_s": 9, "update_s": 31, "step_s": 120}),
    "verl_fully_async.jsonl": (
        APART,
        "fully_async",
        (16, 16),
        {"wait_s": 9, "update_s": 51, "step_s": 78, "sync_s": 4},
    ),
    "nemo_rl.log": (("device=h100",), "colocate_sync", (16, 16), {"log_probs_s": 17, "rollout_s": 60, "step_s": 123}),
    EVENTS: (APART, "fully_async", (16, 16), {"wait_s": 12, "log_probs_s": 26, "update_s": 56, "step_s": 102}),
    "slime.log": (("device=h100",), "colocate_sync", (16, 16), {"rollout_s": 59, "update_s": 33, "sharing_only_s": 5}),
    "slime_async.csv": (APART + BATCH, "one_step_off", (16, 16), {"wait_s": 20, "generate_s": 99, "step_s": 110}),
    "trl_wandb.jsonl": (ALONE + BATCH, "colocate_sync", (16, 16), {"rollout_s": 60, "update_s": 56, "step_s": 120.5}),
    "trl_trainer_state.json": (ALONE + BATCH, "colocate_sync", (16, 16), {"step_s": 118}),
    "prime_rl.jsonl": (APART, "fully_async", (16, 16), {"wait_s": 11, "update_s": 70.5, "step_s": 87}),
    "mlperf.log": (ALONE, "colocate_sync", (16, 16), {"rollout_s": 59, "update_s": 31, "step_s": 119}),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_read_as_it_is(name: str) -> None:
    arguments, schedule, devices, seconds = LOGS[name]
    read = read_log([WRITTEN / name], arguments)
    row, workload = read.row, read.evidence.workload
    assert (row.schedule, row.rollout_devices, row.train_devices) == (schedule, *devices)
    assert {field: getattr(row, field) for field in seconds} == {
        field: pytest.approx(value, rel=0.03) for field, value in seconds.items()
    }
    assert (workload.batch_groups, workload.group_size, workload.device) == (64, 8, "h100")
    if name != "mlperf.log":  # which has no lengths
        assert workload.response_mean == pytest.approx(1800, rel=0.05)
    assert f"warm-up (compiling, loading, filling) is left out: 1 of {6 if name == EVENTS else 8} steps" in read.notes
    assert 0.001 < row.spread["step_s"] < 0.1
    assert _phases(row) <= 1.02 * (row.step_s or 0)


def test_what_a_log_says_of_the_job_is_known() -> None:
    read = read_log([WRITTEN / "verl.log"])
    assert read.evidence.workload == Workload(
        model="qwen7b", device="h100", batch_groups=64, group_size=8, prompt_mean=pytest.approx(150, rel=0.02),
        response_mean=pytest.approx(1800, rel=0.05), response_max=8192.0, cap=8192,
        clipped_share=pytest.approx(0.021), tensor_parallel=2, optimizer_steps=2, recompute_log_probs=True,
        reference=True,
    )  # fmt: skip
    assert (
        read_log([WRITTEN / "verl.log"], ["device=h200", "algorithm.batch_groups=128"]).evidence.workload.device
        == "h200"
    )


def test_a_job_of_a_log_is_what_a_plan_takes_and_what_lacks_is_asked_for() -> None:
    read = read_log([WRITTEN / "verl.log"], ["cost.lengths.mean=2000", "cost.decode_share=0.4"])
    jobs, settings = plan_jobs(["schedule=one_step_off", *read.settings])
    assert (jobs[0].model.name, jobs[0].device.name, jobs[0].cluster.devices) == ("qwen7b", "h100", 16)
    assert (jobs[0].algorithm.batch_groups, jobs[0].algorithm.group_size, jobs[0].algorithm.reference) == (64, 8, True)
    assert {"cost.lengths.mean=2000", "cost.lengths.cap=8192", "cost.decode_share=0.4"} <= set(settings)
    with pytest.raises(ConfigError) as asked:
        read_log([WRITTEN / "slime_async.csv"])
    (line,) = str(asked.value).splitlines()
    assert "add model=qwen7b device=h100 cluster.devices=16 " in line and "algorithm.group_size" in line
    with pytest.raises(ConfigError, match=r"nemo_rl.log does not say device; add device=h100, as it was run"):
        read_log([WRITTEN / "nemo_rl.log"])


def test_the_same_numbers_in_other_containers_are_the_same_row(tmp_path: Path) -> None:
    rows = [json.loads(line)["data"] | {"step": json.loads(line)["step"]} for line in _lines("verl_fully_async.jsonl")]
    names = sorted({name for row in rows for name in row})
    mlflow = tmp_path / "mlflow"
    for name in names:
        (mlflow / "metrics" / name).parent.mkdir(parents=True, exist_ok=True)
        of = [f"1700 {row[name]} {row['step']}" for row in rows if name in row]
        (mlflow / "metrics" / name).write_text("\n".join(of) + "\n")
    csv, exported, series = tmp_path / "history.csv", tmp_path / "mlflow.csv", tmp_path / "series.json"
    csv.write_text("\n".join([",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]))
    exported.write_text(
        "\n".join(["key,value,step"] + [f"{name},{row[name]},{row['step']}" for row in rows for name in row])
    )
    series.write_text(json.dumps({name: {row["step"]: row[name] for row in rows if name in row} for name in names}))
    expected = read_log([WRITTEN / "verl_fully_async.jsonl"], APART)
    for path in (mlflow, csv, exported, series):
        assert _seconds(read_log([path], APART)) == pytest.approx(_seconds(expected)), path


def test_steps_of_warm_up_evaluation_and_restarts_do_not_count(tmp_path: Path) -> None:
    lines = _lines("verl.log")
    told = (WRITTEN / "verl.log").read_text().replace("timing_s/gen:", "timing_s/testing:300.0 - timing_s/gen:", 1)
    (tmp_path / "evaluated.log").write_text(told)
    again = [*lines, lines[-1].replace("timing_s/step:", "timing_s/step:9")]
    (tmp_path / "again.log").write_text("\n".join(again) + "\n")
    assert "1 step logged anew, as after a restart, are left out" in read_log([tmp_path / "again.log"]).notes
    assert _seconds(read_log([tmp_path / "evaluated.log"])) == pytest.approx(_seconds(read_log([WRITTEN / "verl.log"])))


def test_a_log_that_is_cut_off_loses_its_last_line(tmp_path: Path) -> None:
    for name, arguments in (("verl.log", ()), ("prime_rl.jsonl", APART), (EVENTS, APART)):
        data = (WRITTEN / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) - 40])
        cut = read_log([tmp_path / name], arguments)
        assert any("left out" in note and "warm-up" not in note for note in cut.notes), cut.notes
        assert cut.row.step_s == pytest.approx(read_log([WRITTEN / name], arguments).row.step_s, rel=0.05)


BROKEN = {
    "empty.log": ("", r"empty.log is empty; name the log of a run that trained a few steps"),
    "unknown.log": ("epoch 1 loss 0.3\n" * 9, r"unknown.log has no step time of any software that is read: verl \("),
    "half.jsonl": ('{"step": 1, "timing_s/st\n{"step": 2, "timing_s/step": 3.0}\n', r"half.jsonl:1: .* is no JSON"),
    "nan.jsonl": (
        '{"step": 1, "timing_s/step": 9.0}\n{"step": 2, "timing_s/step": NaN}\n',
        r"nan.jsonl:2: timing_s/step=nan is no time; take that step out of the log",
    ),
    "mixed.jsonl": (
        '{"step": 1, "timing_s/step": 9.0}\n{"step": 2, "time/step": 3.0}\n',
        r"mixed.jsonl has timing_s/step of verl \(.*:1\) and time/step of prime-rl \(.*:2\); give the log of one run",
    ),
    "untimed.jsonl": (
        '{"step": 1, "timing_s/update_actor": 9.0}\n{"step": 2, "timing_s/update_actor": 9.5}\n',
        r"untimed.jsonl: verl wrote it, but no step has its time, timing_s/step; log that, too",
    ),
    "exceeds.jsonl": (
        '{"step": 1, "timing_s/step": 9.0, "timing_s/gen": 5.0, "timing_s/update_actor": 6.0}\n',
        r"exceeds.jsonl:1: phases add up to 11 s \(update_s=6\), more than the step's 9 s",
    ),
    "two.csv": ("Step,a - step_time,b - step_time\n1,3,4\n", r"two.csv:1: step_time is there for several runs"),
    "binary.log": ("\0\1\2" * 99, r"binary.log is no text, nor an event file"),
    "events.out.tfevents.9": ("Not an event file. " * 20, r"no event file from byte 0 on"),
    "cells.csv": ("Step,step_time\n1,2,3\n2,3\n", r"cells.csv:2: 3 cells under 2 names"),
    "cut.json": ('{"log_history": [{"step": 1,\n', r"cut.json:1: .* is no JSON"),
    "mllog.log": (':::MLLOG {"key": }\n', r"mllog.log:1: what is behind :::MLLOG is no JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_log_that_cannot_be_used_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as refused:
        read_log([tmp_path / name], ALONE + BATCH)
    assert "\n" not in str(refused.value)


def _lines(name: str) -> list[str]:
    return (WRITTEN / name).read_text().splitlines()


def _seconds(read: ReadLog) -> dict[str, float]:
    return {field: value for field, value in vars(read.row).items() if field.endswith("_s") and value is not None}


def _phases(row: StepRow) -> float:
    return sum(getattr(row, field) or 0.0 for field in PHASES)


SAID: dict[str, tuple[str, ...]] = {
    "verl.log": (),
    "prime_rl.jsonl": ("model=qwen7b", "device=h100", "cluster.devices=32", "schedule.split.rollout=16", BATCH[1]),
    "trl_trainer_state.json": ("model=qwen7b", "device=h100", "cluster.devices=16", *BATCH),
}


@pytest.mark.parametrize(
    "name", [name if name == "verl.log" else pytest.param(name, marks=pytest.mark.slow) for name in SAID]
)
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
