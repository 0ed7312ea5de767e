"""Experts that are spread over ranks, and divided among those that share layers, against samples taken alone by plain
torch: four processes, in each layout in turn."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh

from engines.torch.critic import FSDPCritic, value_model
from engines.torch.experts import experts_of
from engines.torch.first_weights import local_part
from engines.torch.fsdp import FSDPEngine, TrainedModel
from engines.torch.model import outline_model
from harness.config import TrainingConfig
from harness.protocols import ValueBatch
from harness.transfer_queue import Ragged
from harness.weight_sync import plan
from tests.support.fsdp_samples import (
    CPU,
    FREE,
    SAMPLES,
    SMALL,
    Tensors,
    World,
    batch_of,
    computed,
    gradients,
    plain_gradients,
    received,
    same_bits,
    save,
    train,
    weights,
)
from tests.support.processes import run_ranks

pytestmark = pytest.mark.slow

WORLD = 4
MODEL = replace(SMALL, architecture="qwen3_moe", experts=8, active_experts=2, tied_embeddings=False)
LAYOUTS = {
    "EP4": TrainingConfig(expert_parallel=4),
    "EP2 x DP2": TrainingConfig(expert_parallel=2),
    "TP2 x DP2": TrainingConfig(tensor_parallel=2),
    "EP2 x TP2": TrainingConfig(expert_parallel=2, tensor_parallel=2),
}
FRUGAL = {"layout": "packed", "recompute_activations": True, "optimizer_offload": "always"}
WITHIN = 4
"""Roundings of one rank's float32 that a layout may be off by: it adds up the same numbers in another order."""


@dataclass
class Told:
    """What one rank saw: gradients of a step and their norm, and weights after it; gradients of other settings, in half
    precision and of a critic; the numbers that it holds, also of experts, and those that it sent to owners."""

    gradients: Tensors
    norm: float
    weights: Tensors
    frugal: Tensors
    half: Tensors
    critic: Tensors
    held: int
    numbers: int
    given: int


def part(rank: int, training: TrainingConfig) -> range:
    """The samples of a data-parallel rank."""
    return range(rank // training.tensor_parallel, SAMPLES, WORLD // training.tensor_parallel)


def values_of(samples: range) -> ValueBatch:
    batch = batch_of(samples)
    like = batch.behaviour_log_probs
    columns = (like, Ragged(like.values + 1, like.lengths), Ragged(np.ones(len(like.values), np.bool_), like.lengths))
    return ValueBatch(batch.prompts, batch.responses, *columns)


def value_gradients(world: World, training: TrainingConfig | None, samples: range) -> Tensors:
    engine = FSDPCritic(value_model(outline_model(MODEL)), FREE, mesh=world.mesh, device=CPU, training=training)
    with torch.no_grad():
        local_part(engine.masters["score.weight"]).fill_(0.05)  # so that all below it has a gradient
    computed(engine.accumulate(values_of(samples)))
    computed(engine.step())
    return gradients(engine)


def step(engine: FSDPEngine, samples: range) -> float:
    """Of two micro-batches; the norm of its gradient."""
    return train(engine, [samples[:2], samples[2:]])


def experts_held(engine: TrainedModel[Any, Any]) -> int:
    return sum(local_part(each).numel() for name, each in engine.masters.items() if ".experts." in name)


def in_layout(world: World, rank: int, training: TrainingConfig, folder: Path) -> Told:
    mine = part(rank, training)
    engine = world.engine(FREE, training, MODEL)
    norm = step(engine, mine)
    save(engine, folder)
    frugal = world.engine(FREE, replace(training, tokens_per_micro_batch=40, **FRUGAL), MODEL)
    train(frugal, [mine])
    half = world.engine(FREE, training, replace(MODEL, dtype="bfloat16"))
    step(half, mine)
    with patch.object(plan, "_exchange", wraps=plan._exchange) as exchange:
        received(engine.named_parameters(), rank, WORLD)
    given = sum(call.args[1].numel() for call in exchange.call_args_list if call.args[0] is dist.isend)
    numbers = sum(local_part(each).numel() for each in engine.masters.values())
    values, held = value_gradients(world, training, mine), experts_held(engine)
    found = (gradients(each) for each in (engine, frugal, half))
    return Told(next(found), norm, weights(engine), *found, values, held, numbers, given)


def one_rank(store: Store, rank: int, folder: Path) -> dict[str, tuple[Told, Tensors]]:
    """Each layout, and the weights with which it goes on from the state that the layout before it has saved."""
    told, before = {}, ""
    with World(PrefixStore("world", store), rank, WORLD) as world:
        for name, training in LAYOUTS.items():
            if training.tensor_parallel > 1:
                world.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            told[name] = in_layout(world, rank, training, folder / name), Tensors()
            if before:
                engine = world.engine(FREE, training, MODEL)
                computed(engine.load(folder / before))
                told[name][1].update(weights(engine))
            before = name
    return told


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Told, Tensors]]]:
    return run_ranks(one_rank, WORLD, tmp_path_factory.mktemp("states"), timeout_s=300)


@pytest.fixture(params=list(LAYOUTS))
def ranks(request: pytest.FixtureRequest, everyone: list[dict[str, tuple[Told, Tensors]]]) -> list[Told]:
    return [told[request.param][0] for told in everyone]


@cache
def truth() -> Tensors:
    """Gradients in float64."""
    return plain_gradients(range(SAMPLES), FREE, torch.float64, MODEL)


def furthest(ours: Tensors, truth: Tensors) -> float:
    """How far the worst tensor is off, of its own largest number."""
    assert ours.keys() == truth.keys()
    return max(float((ours[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in truth.items())


@cache
def rounding() -> float:
    """How far one rank's float32 is off."""
    return furthest(plain_gradients(range(SAMPLES), FREE, config=MODEL), truth())


def test_gradients_of_every_tensor_are_those_of_samples_taken_alone(ranks: list[Told]) -> None:
    norm = float(torch.nn.utils.get_total_norm(truth().values()))
    for told in ranks:
        for ours in (told.gradients, told.frugal):
            assert furthest(ours, truth()) < WITHIN * rounding()
        assert told.norm == pytest.approx(norm, rel=WITHIN * rounding())


def test_half_precision_is_off_by_its_own_rounding(ranks: list[Told], world: World) -> None:
    engine = world.engine(FREE, model=replace(MODEL, dtype="bfloat16"))
    step(engine, range(SAMPLES))
    bound = furthest(gradients(engine), truth())
    assert all(furthest(told.half, truth()) < 2 * bound for told in ranks)


def test_what_an_owner_holds_is_not_sent_and_all_else_is_sent_to_it_once(ranks: list[Told]) -> None:
    whole = sum(tensor.numel() for tensor in ranks[0].weights.values())
    assert sum(told.given for told in ranks) == sum(whole - told.numbers for told in ranks)


def test_every_rank_holds_as_many_of_the_experts_numbers(ranks: list[Told]) -> None:
    whole = sum(tensor.numel() for name, tensor in ranks[0].weights.items() if ".experts." in name)
    assert [told.held for told in ranks] == [whole // WORLD] * WORLD


def test_a_critic_learns_as_on_one_rank(ranks: list[Told], world: World) -> None:
    expected = value_gradients(world, None, range(SAMPLES))
    assert all(furthest(told.critic, expected) < 2 * WITHIN * rounding() for told in ranks)


def test_a_layout_goes_on_from_the_state_of_another(everyone: list[dict[str, tuple[Told, Tensors]]]) -> None:
    names = list(LAYOUTS)
    for told in everyone:
        for before, name in zip(names, names[1:], strict=False):
            assert same_bits(told[name][1], told[before][0].weights)


def test_experts_are_found_by_the_tensors_that_hold_them() -> None:
    assert len(list(experts_of(outline_model(MODEL).model))) == MODEL.layers
    assert not list(experts_of(outline_model(SMALL).model))
