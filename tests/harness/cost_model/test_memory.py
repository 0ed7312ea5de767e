"""What fits on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.config import ConfigError
from harness.config.compose import compose_job
from harness.cost_model.memory import (
    GIB,
    Layout,
    activation_bytes_per_token,
    gathered_bytes,
    kv_tokens,
    scoring_bytes,
    state_bytes,
    training_bytes,
)
from harness.cost_model.shape import parameters
from tests.support.rooflines import DEVICE, FACTORS, MODEL

ALL = parameters(MODEL)


def test_training_needs_state_gathered_weights_and_activations() -> None:
    layout = Layout(train_ranks=4, train_devices=2)
    assert state_bytes(MODEL, layout) == 16 * ALL / 8
    layer = 8 * (8 + 4 + 4 + 8) + 3 * 8 * 16
    assert gathered_bytes(MODEL, layout) == 2 * (2 * layer + 2 * 80) / 2
    of_layer = 4 * 8 + 2 * 8 + 2 * 4 + 4 * 16
    assert activation_bytes_per_token(MODEL, layout) == 2 * 2 * of_layer / 2
    again = replace(layout, recompute=True)
    assert activation_bytes_per_token(MODEL, again) == 2 * (2 * 8 + of_layer) / 2
    assert training_bytes(MODEL, layout, 3) == 4 * ALL / 2 + gathered_bytes(MODEL, layout) + 3 * 2 * of_layer
    assert scoring_bytes(MODEL, 4) == 2 * ALL / 4


def test_activations_of_a_7b_model_are_those_of_the_paper() -> None:
    """Korthikanti et al.: 34 bytes x hidden for a token and a layer, 3 of them masks of dropout. Ours has a gate: 8 in
    place of 16 bytes x hidden are 4 x 2 of four networks' width."""
    model = replace(compose_job(["model=qwen7b"]).model, ff=2 * 3584, kv_heads=28)
    assert activation_bytes_per_token(model, Layout()) / (28 * 3584) == 34 - 3 + 1


def test_the_cache_holds_what_the_weights_leave() -> None:
    assert kv_tokens(MODEL, DEVICE, FACTORS, Layout()) == (90_000 - 2 * ALL) // 32
    assert kv_tokens(MODEL, DEVICE, FACTORS, Layout(colocated=True)) == (50_000 - 2 * ALL) // 32
    wide = replace(MODEL, kv_heads=2)
    assert kv_tokens(wide, DEVICE, FACTORS, Layout(engine_devices=2)) == (90_000 - parameters(wide)) // 32


def test_weights_that_leave_no_room_are_refused_with_a_way_out() -> None:
    config = compose_job(["model=qwen32b"])
    need = r"its weights are 61\.0 GiB on each device of a rollout engine, which may use 44\.7 GiB of device=h100"
    with pytest.raises(ConfigError, match=rf"{need}; set ARGS=\"engine.tensor_parallel=2\" or .*DEVICE=h200"):
        kv_tokens(config.model, config.device, config.cost, Layout(colocated=True))  # type: ignore[arg-type]


def test_training_fits_where_enough_devices_share_it_or_activations_are_computed_again() -> None:
    model = compose_job(["model=qwen7b"]).model
    few, many = Layout(train_ranks=2), Layout(train_ranks=16)
    assert training_bytes(model, many, 4096) < 72 * GIB < training_bytes(model, few, 4096)
    assert training_bytes(model, replace(many, recompute=True), 30_000) < 72 * GIB < training_bytes(model, many, 30_000)
    assert training_bytes(model, few, 0) / GIB > 57
