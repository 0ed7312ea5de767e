"""Settings of the training world: what is refused at the door, and what several ranks on one micro-batch report."""

import sysconfig
from pathlib import Path

import pytest

from harness.checks.job import JobPlan, plan_job
from harness.config import ConfigError
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import Machine
from harness.cost_model.shape import parameters

PUBLISHED = {"0.6b": 0.596, "1.7b": 1.721, "4b": 4.022, "8b": 8.191, "14b": 14.768, "32b": 32.762}
"""Billions of parameters of the dense Qwen3 models, tied embeddings once."""


def plan(*settings: str) -> JobPlan:
    config = compose_job(["backend=real", "schedule=colocate_sync", "cluster.devices=4", *settings])
    return plan_job(config, make_schedule(config), Machine(cores=8, gpus=0, gpu_bytes=0))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["tensor_parallel=3"], "training.tensor_parallel=3 does not divide the 4 training ranks; set it to 1 or 2"),
        (["tensor_parallel=4"], "training.tensor_parallel=4 does not divide the 2 model.kv_heads; set it to 1 or 2"),
        (["tensor_parallel=0"], "training.tensor_parallel=0 is too small; use at least 1"),
        (["tokens_per_micro_batch=9"], "training.tokens_per_micro_batch=9 is less than the 20 that a sample may have"),
        (["layout=flat"], "training.layout=flat is unknown; choose 'padded' or 'packed'"),
        (["compile=true", "tensor_parallel=2"], "training.compile=true does not work with training.tensor_parallel=2"),
        (["recompute_activations=1"], "training.recompute_activations=1 is neither true nor false"),
        (["lora_rank=-1"], "training.lora_rank=-1 is too small; use at least 0"),
        (["lora_rank=65"], "training.lora_rank=65 is more than model.hidden=64"),
        (
            ["lora_rank=8", "lora_targets=[q_proj,lm_head]"],
            "training.lora_targets names lm_head; linear layers of model=tiny are q_proj, k_proj, v_proj, o_proj, gate",
        ),
        (["lora_rank=8", "lora_targets=[q_proj,q_proj]"], "training.lora_targets=['q_proj', 'q_proj'] names a layer"),
        (["lora_rank=8", "tensor_parallel=2"], "training.lora_rank=8 is not built for training.tensor_parallel=2"),
        (["lora_rank=8", "pipeline_parallel=2"], "training.lora_rank=8 is not built for training.pipeline_parallel=2"),
        (["lora_rank=8", "expert_parallel=2"], "training.lora_rank=8 is not built for training.expert_parallel=2"),
    ],
)
def test_what_cannot_work_is_refused_at_the_door(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*(f"training.{setting}" for setting in settings))
    assert str(caught.value).startswith(told)


def test_adapters_are_refused_beside_what_is_not_built_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = ("training.lora_rank=8", "schedule=separated_sync")
    with pytest.raises(ConfigError, match="lora_rank=8 is not built for cluster.delta_weights=true; set that to false"):
        plan(*lora, "cluster.delta_weights=true")
    monkeypatch.setenv("CADENCE_SGLANG_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="servers of engine=sglang that run already"):
        plan(*lora, "engine=sglang")


def test_a_machine_without_compiler_and_headers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"C\+\+ compiler .* and Python's headers .* set training.compile=false"):
        plan("training.compile=true", "algorithm.micro_batch_groups=4")


def test_ranks_that_share_layers_count_once_and_a_batch_too_large_to_tell_of_is_refused() -> None:
    micro_batches_of_eight = "algorithm.micro_batch_groups=8"
    with pytest.raises(ConfigError, match="8 groups on 4 training ranks"):
        plan(micro_batches_of_eight)
    assert len(plan(micro_batches_of_eight, "training.tensor_parallel=2").placement.devices["actor"]) == 4
    many = "algorithm.batch_groups=131072 algorithm.group_size=16 engine.slots=16".split()
    with pytest.raises(ConfigError, match="2,097,152 samples an iteration, more than the 1,048,576 that a message"):
        plan(*many)


@pytest.mark.parametrize("size", PUBLISHED)
def test_qwen3_shapes_have_the_parameters_that_were_published(size: str) -> None:
    assert parameters(compose_job([f"model=qwen3-{size}"]).model) / 1e9 == pytest.approx(PUBLISHED[size], abs=1e-3)
