"""`make bench` of a model that this machine cannot hold: planned, said, reproducible; and nothing else is touched."""

from __future__ import annotations

import shlex

import pytest

from harness.config import ConfigError, JobConfig
from harness.config.compose import cell_name, compose_job
from harness.config.machine import Machine
from harness.studies.planner.automatic import DEVICES, PlannedJob, with_plan
from harness.studies.planner.explore import Effort

LAPTOP = Machine(cores=2, gpus=0, gpu_bytes=0)
LARGE = ("model=qwen7b", "algorithm.batch_groups=8", "algorithm.group_size=4", "cost.lengths.mean=64")


@pytest.fixture(autouse=True)
def one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.studies.planner.automatic.EFFORT", Effort(samples=1, trials=1))
    monkeypatch.setattr("harness.studies.planner.explore._LEAST_SAMPLES", 1)


def planned(*arguments: str) -> PlannedJob:
    return with_plan(compose_job(arguments), arguments, LAPTOP)


def left_alone(*arguments: str) -> bool:
    config = compose_job(arguments)
    return with_plan(config, arguments, LAPTOP) == PlannedJob(config)


def from_command(command: str) -> JobConfig:
    """The job of a `make bench` command, as the Makefile passes it on."""
    names = {"SCHEDULE": "schedule", "MODEL": "model", "DEVICES": "cluster.devices", "ITERATIONS": "iterations"}
    settings: list[str] = []
    for word in shlex.split(command)[2:]:
        name, _, value = word.partition("=")
        settings += value.split() if name == "ARGS" else [f"{names[name]}={value}"]
    return compose_job([*settings, "backend=virtual"])


@pytest.mark.parametrize("schedule", ["fully_async", "half_step", "colocate_sync"])
def test_the_command_that_it_says_makes_the_same_job(schedule: str) -> None:
    job = planned(f"schedule={schedule}", *LARGE)
    why, what, command = job.messages
    assert why.startswith("Why: model=qwen7b needs ") and what.startswith(f"Planned for {DEVICES} devices: ")
    assert cell_name(job.config) == cell_name(from_command(command))
    assert job.config.backend == "virtual" and job.config.cluster.devices == DEVICES
    assert job == planned(f"schedule={schedule}", *LARGE), "the same every time"


def test_what_the_user_says_of_devices_and_staleness_stays() -> None:
    job = planned("schedule=fully_async", *LARGE, "cluster.devices=8", "schedule.max_staleness=1").config
    assert job.cluster.devices == 8 and job.schedule.options["max_staleness"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        ("model=qwen7b", "schedule.split.rollout=1", "backend=virtual"),
        ("model=qwen7b", "engine.tensor_parallel=2"),
        ("model=qwen7b", "training.pipeline_parallel=2"),
        ("model=qwen7b", "algorithm.micro_batch_groups=2"),
        ("model=tiny",),
        ("model=tiny", "backend=real"),
        ("model=tiny", "backend=paced"),
        ("model=tiny", "backend=virtual", "cost=tiny_cpu"),
    ],
)
def test_a_job_with_a_split_or_a_real_one_is_left_as_it_is(settings: tuple[str, ...]) -> None:
    assert left_alone(*settings)


def test_a_mistake_in_a_job_that_would_be_real_is_still_told() -> None:
    with pytest.raises(ConfigError, match="half_step needs 2 rollout engines"):
        planned("model=tiny", "schedule=half_step")


def test_too_few_devices_for_any_split_are_told() -> None:
    with pytest.raises(ConfigError, match="fits no split of 2 devices of device=h100; set DEVICES higher"):
        planned("model=qwen32b", "cluster.devices=2")
