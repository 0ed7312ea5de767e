"""Layouts that cannot be, jobs that a device cannot hold, and what only a simulation can do: refused in one line."""

from __future__ import annotations

import pytest

from harness.cli import main as cli
from harness.config import ConfigError
from harness.config.checks.job import JobPlan, plan_job
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import Machine
from harness.cost_model.job_cost import layout_of, simulated_cost
from harness.cost_model.memory import Layout

BIG = ("backend=virtual", "model=qwen7b", "cluster.devices=16", "algorithm.micro_batch_groups=1")


def plan(*settings: str) -> JobPlan:
    config = compose_job(settings)
    return plan_job(config, make_schedule(config), Machine(cores=64, gpus=0, gpu_bytes=0))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["engine.tensor_parallel=3"],
            "engine.tensor_parallel=3 does not divide the 8 rollout devices; set it to 1 or",
        ),
        (
            ["engine.tensor_parallel=8"],
            "engine.tensor_parallel=8 does not divide the 28 model.heads; set it to 1 or 2",
        ),
        (
            ["schedule=half_step", "engine.tensor_parallel=4", "schedule.split.rollout=4"],
            "schedule=half_step needs 2 rollout engines, its split gives 1 of 16 devices; set schedule.split.rollout=8",
        ),
        (
            ["training.pipeline_parallel=3"],
            "training.pipeline_parallel=3 does not divide the 28 model.layers; set it to",
        ),
        (
            ["training.pipeline_parallel=4", "training.tensor_parallel=4"],
            "training.tensor_parallel=4 times training.pipeline_parallel=4 does not divide the 8 devices of actor; set",
        ),
        (
            ["training.tensor_parallel=2", "schedule.split.reference=1"],
            "training.tensor_parallel=2 does not divide the 7 training ranks; set it to 1",
        ),
        (
            ["training.tensor_parallel=2", "schedule.split.reference=1", "schedule.split.actor=4"],
            "training.tensor_parallel=2 times training.pipeline_parallel=1 does not divide the 1 device of reference",
        ),
        (
            ["training.expert_parallel=2"],
            "training.expert_parallel=2: model=qwen7b has no experts; set it to 1",
        ),
        (
            ["model=qwen3-30b-a3b", "training.expert_parallel=5"],
            "training.expert_parallel=5 does not divide the 8 data-parallel ranks; set it to 1 or 2 or 4 or 8",
        ),
        (["+model.experts=4"], "model.active_experts=0 cannot be chosen of model.experts=4; use 1 to 4"),
        (["+model.active_experts=4"], "model.active_experts=4 cannot be chosen of model.experts=0; set it to 0"),
        (
            ["cost.lengths.cap=30000"],
            "model=qwen7b needs 177.1 GiB on each device of actor+actor_fwd+reference, 156.4 of them for the "
            "activations of the longest sample (30,512 tokens), and may use 67.1 GiB of device=h100; use "
            "training.recompute_activations=true, more devices for actor+actor_fwd+reference, or a device with more",
        ),
        (
            ["model=qwen32b", "training.recompute_activations=true", "device=ascend910b"],
            "model=qwen32b: its weights are 61.0 GiB on each device of a rollout engine, which may use 53.6 GiB of "
            'device=ascend910b; set ARGS="engine.tensor_parallel=2" or a device with more memory',
        ),
        (
            ["model=qwen32b", "cost.lengths.cap=40000", "training.recompute_activations=true"],
            "model=qwen32b: beside its weights a rollout engine on device=h100 has room for 24",
        ),
    ],
)
def test_what_no_device_can_do_is_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*BIG, *settings)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["engine.tensor_parallel=2"],
            "engine.tensor_parallel=2 can be simulated only; set it to 1, or BACKEND=virtual",
        ),
        (["training.pipeline_parallel=2"], "training.pipeline_parallel=2 can be simulated only"),
        (["model=qwen3-30b-a3b", "cluster.memory_gib=9999"], "model.experts=128 can be simulated only; set it to 0"),
    ],
)
def test_what_can_be_simulated_only_is_refused_on_real_devices_and_simulated_otherwise(
    settings: list[str], told: str
) -> None:
    job = (
        "schedule.split.rollout=8",
        "cluster.devices=16",
        "algorithm.micro_batch_groups=1",
        "cost=tiny_cpu",
        *settings,
    )
    with pytest.raises(ConfigError) as caught:
        plan("backend=real", *job)
    assert str(caught.value).startswith(told)
    found = plan("backend=auto", *job)
    assert found.backend == "virtual" and found.why.startswith(told)


def test_costs_of_one_device_are_not_divided(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["backend=virtual", "cost=tiny_cpu", "cluster.devices=4", "engine.tensor_parallel=2"]
    assert cli.main(["bench", *job]) == 2
    said = "engine.tensor_parallel=2: cost=tiny_cpu gives what a worker of one device takes, and cannot be divided; use"
    assert capsys.readouterr().err.startswith(said)


def test_a_layout_is_read_off_the_settings_and_the_split() -> None:
    apart = compose_job(
        [*BIG, "engine.tensor_parallel=4", "training.tensor_parallel=2", "training.pipeline_parallel=2"]
    )
    assert layout_of(apart, plan_job(apart, make_schedule(apart), Machine(1, 0, 0)).placement) == Layout(
        engine_devices=4, train_devices=4, train_ranks=2, pipeline=2, samples_per_call=8
    )
    shared = compose_job([*BIG, "schedule=colocate_sync", "cluster.devices=8"])
    placement = plan_job(shared, make_schedule(shared), Machine(1, 0, 0)).placement
    assert layout_of(shared, placement) == Layout(train_ranks=8, colocated=True, samples_per_call=8, one_node=True)
    assert simulated_cost(shared, placement).name == "roofline"
    given = compose_job([*BIG, "cost=tiny_cpu"])
    assert simulated_cost(given, placement) is given.cost
