"""Parameters, operations and bytes of a model's shape, against counting and against what is published."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from harness.config import ModelConfig
from harness.config.compose import EXPERIMENTS, choices, compose_job
from harness.cost_model.shape import (
    active_parameters,
    decode_flops_per_cached_token,
    forward_flops_per_pair,
    forward_flops_per_token,
    kv_bytes_per_token,
    parameters,
    prefill_flops_per_token,
    weight_bytes,
)
from tests.support.rooflines import MODEL


def test_a_dense_token_is_multiplied_with_all_but_embeddings_and_norms() -> None:
    model = compose_job(["model=qwen7b"]).model
    norms = 28 * (2 * 128 + 2 * 3584) + 3584
    assert active_parameters(model) == parameters(model) - 152064 * 3584 - norms
    assert forward_flops_per_token(model) - prefill_flops_per_token(model) == 2 * 152064 * 3584


def test_a_mixture_of_experts_is_as_large_as_its_name_says() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.3 billion of them for a token with the table of embeddings."""
    model = compose_job(["model=qwen3-30b-a3b"]).model
    assert parameters(model) / 1e9 == pytest.approx(30.5, abs=0.05)
    assert (active_parameters(model) + model.vocabulary * model.hidden) / 1e9 == pytest.approx(3.3, abs=0.1)


def test_every_model_of_the_files_has_the_size_in_its_name() -> None:
    for name in choices("model"):
        billions = name.removeprefix("qwen3-").removeprefix("qwen").partition("b")[0]
        if billions != "tiny":
            model = ModelConfig(**OmegaConf.load(EXPERIMENTS / "model" / f"{name}.yaml"))
            assert parameters(model) / 1e9 == pytest.approx(float(billions), rel=0.25, abs=0.2), name


def test_operations_and_bytes_equal_arithmetic_by_hand() -> None:
    layer = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16  # queries, keys, values, output, feed-forward
    assert active_parameters(MODEL) == 2 * layer + 10 * 8
    assert parameters(MODEL) == 2 * (layer + 2 * 4 + 2 * 8) + 2 * 10 * 8 + 8
    assert forward_flops_per_token(MODEL) == 2 * (2 * layer + 80)
    assert kv_bytes_per_token(MODEL) == 2 * 2 * 1 * 4 * 2  # keys and values, layers, KV heads, head_dim, bytes
    assert weight_bytes(MODEL) == 2 * parameters(MODEL)


def test_attention_of_a_sequence_is_that_of_its_tokens_in_turn() -> None:
    tokens = 1000
    in_turn = sum(decode_flops_per_cached_token(MODEL) * cached for cached in range(tokens))
    assert forward_flops_per_pair(MODEL) * tokens**2 == pytest.approx(in_turn, rel=0.01)
