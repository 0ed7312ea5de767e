"""Shapes read from config.json, held against the models that transformers makes of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config import ModelConfig
from harness.config.compose import choices, compose_job
from harness.config.model_folder import model_settings
from harness.cost_model.roofline import roofline
from harness.cost_model.shape import (
    decode_flops_per_cached_token,
    forward_flops_per_pair,
    kv_bytes_per_token,
    parameters,
)
from harness.planner.plan import plan_jobs
from tests.support.random_models import SIZES
from tests.support.rooflines import DEVICE, FACTORS

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mistral, sliding": ("mistral", {"sliding_window": 16}),
}


def on_meta(config: Any) -> int:
    """Weights of the model that transformers makes of a configuration, none of them in memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_folders_parameters_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    architecture, changes = MODELS[name]
    config = AutoConfig.for_model(architecture, **(SIZES | changes))
    config.save_pretrained(tmp_path)
    model = ModelConfig(**model_settings(str(tmp_path)))
    assert parameters(model) == on_meta(config)


@pytest.mark.parametrize(
    ("architecture", "changes", "windowed"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, 1),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3, "num_experts": 8}, 4),
        ("qwen3_moe", {"sliding_window": 16, "num_experts": 8}, 0),
        ("llama", {}, 0),
    ],
)
def test_plans_of_a_folder_have_its_shape(
    architecture: str, changes: dict[str, Any], windowed: int, tmp_path: Path
) -> None:
    """Windows in as many layers as transformers gives one: in those from `max_window_layers` on of Qwen2, in all of
    Qwen3 with experts, and in none unless `use_sliding_window` says so."""
    from transformers import AutoConfig

    AutoConfig.for_model(architecture, **(SIZES | {"num_hidden_layers": 4} | changes)).save_pretrained(tmp_path)
    jobs, _ = plan_jobs([f"model={tmp_path}", "schedule=fully_async", "cluster.devices=8"])
    model = jobs[0].model
    assert (model.architecture, model.layers, model.experts) == (architecture, 4, changes.get("num_experts", 0))
    assert (model.sliding_layers, model.sliding_window) == (windowed, 16 if windowed else None)


@pytest.mark.parametrize("name", sorted(set(choices("model")) - {"qwen3-30b-a3b"}))
def test_known_names_have_the_parameters_of_the_architecture_that_they_name(name: str) -> None:
    from engines.torch.model import transformers_config

    model = compose_job([f"model={name}"]).model
    assert parameters(model) == on_meta(transformers_config(model))
    assert model.checkpoint is None or model.checkpoint.startswith("hf:Qwen/Qwen")


def test_a_sliding_windows_cost_and_room_are_those_inside_of_it() -> None:
    full = compose_job(["model=qwen7b"]).model
    half = replace(full, sliding_window=1000, sliding_layers=14)
    seen = sum(min(token, 1000) for token in range(4000))
    pairs = (14 * sum(range(4000)) + 14 * seen) / (28 * sum(range(4000)))
    assert forward_flops_per_pair(half, 4000) / forward_flops_per_pair(full) == pytest.approx(pairs, rel=1e-3)
    for of in (kv_bytes_per_token, decode_flops_per_cached_token):
        assert of(half, 4000) == of(full, 4000) * (14 + 14 / 4) / 28
        assert of(half, 800) == of(full, 800) == of(full)
    from harness.cost_model.memory import JobLayout
    from tests.support.rooflines import MODEL

    windowed = replace(MODEL, sliding_window=2, sliding_layers=MODEL.layers)
    full, short = (roofline(model, DEVICE, FACTORS, JobLayout()) for model in (MODEL, windowed))
    assert full.kv_tokens is not None and short.kv_tokens is not None and short.kv_tokens > full.kv_tokens
    assert short.decode_s_per_cached_token < full.decode_s_per_cached_token
    assert short.train_s_per_pair < full.train_s_per_pair and short.prefill_s_per_pair < full.prefill_s_per_pair
