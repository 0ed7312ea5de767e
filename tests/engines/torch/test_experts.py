"""Experts that are spread over ranks, and divided among those that share layers, against samples taken alone by plain
torch: four processes, in each layout in turn."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from engines.torch.critic import FSDPCritic, value_model
from engines.torch.experts import experts_of
from engines.torch.first_weights import local_part
from engines.torch.fsdp import FSDPEngine, TrainedModel
from engines.torch.model import outline_model
from harness.config import TrainingConfig
from harness.protocols import ValueBatch
from harness.rl.diagnostics import ROUTED
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
from tests.support.processes import run_in_processes

WORLD, STEPS = 4, 5
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
    """What one rank saw: gradients of the first step and their norm; weights after one step and after five, the latter
    also as their transfer plan delivers them, the former also of a second run; log-probs of its samples before it all;
    gradients of other settings, in half precision and of a critic; and whether it skipped a step and kept its
    weights."""

    gradients: Tensors
    norm: float
    first: Tensors
    last: Tensors
    sent: Tensors
    again: Tensors
    scored: list[np.ndarray]
    frugal: Tensors
    half: Tensors
    skipped: list[float]
    critic: Tensors
    held: int
    routed: dict[str, float]
    given: int
    numbers: int


def routed(sums: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in sums.items() if name.startswith(ROUTED)}


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


def steps(engine: FSDPEngine, samples: range, count: int) -> float:
    """So many steps of two micro-batches each; the norm of the first one's gradient."""
    return [train(engine, [samples[:2], samples[2:]]) for _ in range(count)][0]


def experts_held(engine: TrainedModel[Any, Any]) -> int:
    return sum(local_part(each).numel() for name, each in engine.masters.items() if ".experts." in name)


def in_layout(world: World, rank: int, training: TrainingConfig, folder: Path) -> Told:
    mine = part(rank, training)
    batch = batch_of(mine)
    engine = world.engine(FREE, training, MODEL)
    scorers = [engine.scorer(), world.reference(MODEL, training)]
    scored = [computed(scorer.log_probs(batch.prompts, batch.responses)).values for scorer in scorers]
    norm = steps(engine, mine, 1)
    found, first = gradients(engine), weights(engine)
    save(engine, folder)
    steps(engine, mine, STEPS - 1)
    other = world.engine(FREE, training, MODEL)
    steps(other, mine, 1)
    frugal = world.engine(FREE, replace(training, tokens_per_micro_batch=40, **FRUGAL), MODEL)
    sums = computed(frugal.accumulate(batch))
    computed(frugal.step())
    half = world.engine(FREE, training, replace(MODEL, dtype="bfloat16"))
    steps(half, mine, 1)
    before = weights(other)
    broken = replace(batch, advantages=np.full_like(batch.advantages, math.nan if rank == 0 else 1.0))
    computed(other.accumulate(broken))
    skipped = computed(other.step())["skipped"]
    told = [skipped, float(same_bits(before, weights(other)))]
    with patch.object(plan, "_exchange", wraps=plan._exchange) as exchange:
        sent = received(engine.named_parameters(), rank, WORLD)
    given = sum(call.args[1].numel() for call in exchange.call_args_list if call.args[0] is dist.isend)
    values = value_gradients(world, training, mine)
    last = weights(engine)
    return Told(
        found, norm, first, last, sent, before, scored, gradients(frugal), gradients(half), told, values,
        experts_held(engine),
        routed(sums),
        given,
        sum(local_part(each).numel() for each in engine.masters.values()),
    )  # fmt: skip


def one_rank(rank: int, port: int, folder: Path) -> dict[str, tuple[Told, Tensors]]:
    """Each layout, and the weights with which it goes on from the state that the layout before it has saved."""
    store = TCPStore("127.0.0.1", port, WORLD, False, wait_for_workers=False)
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
    store = TCPStore("127.0.0.1", 0, WORLD, True, wait_for_workers=False)
    folder = tmp_path_factory.mktemp("states")
    return run_in_processes(one_rank, [(rank, store.port, folder) for rank in range(WORLD)], timeout_s=300)


@pytest.fixture(params=list(LAYOUTS))
def ranks(request: pytest.FixtureRequest, everyone: list[dict[str, tuple[Told, Tensors]]]) -> list[Told]:
    return [told[request.param][0] for told in everyone]


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    with World() as world:
        yield world


@cache
def truth() -> Tensors:
    """Gradients in float64."""
    model, _ = plain_gradients(range(SAMPLES), FREE, torch.float64, MODEL)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def furthest(ours: Tensors, truth: Tensors) -> float:
    """How far the worst tensor is off, of its own largest number."""
    assert ours.keys() == truth.keys()
    return max(float((ours[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in truth.items())


@cache
def rounding() -> float:
    """How far one rank's float32 is off."""
    model, _ = plain_gradients(range(SAMPLES), FREE, config=MODEL)
    return furthest({name: parameter.grad for name, parameter in model.named_parameters()}, truth())


def test_gradients_of_every_tensor_are_those_of_samples_taken_alone(ranks: list[Told]) -> None:
    norm = float(torch.nn.utils.get_total_norm(truth().values()))
    for told in ranks:
        for ours in (told.gradients, told.frugal):
            assert furthest(ours, truth()) < WITHIN * rounding()
        assert told.norm == pytest.approx(norm, rel=WITHIN * rounding())


def test_half_precision_is_off_by_its_own_rounding(ranks: list[Told], alone: World) -> None:
    engine = alone.engine(FREE, model=replace(MODEL, dtype="bfloat16"))
    steps(engine, range(SAMPLES), 1)
    bound = furthest(gradients(engine), truth())
    assert all(furthest(told.half, truth()) < 2 * bound for told in ranks)


def test_log_probs_of_policy_and_reference_are_those_of_one_rank(ranks: list[Told], alone: World) -> None:
    scorer = alone.engine(FREE, model=MODEL).scorer()
    batch = batch_of(range(SAMPLES))
    expected = list(computed(scorer.log_probs(batch.prompts, batch.responses)).rows())
    for rank, told in enumerate(ranks):
        apart = WORLD if len({len(each.scored[0]) for each in ranks}) == WORLD else WORLD // 2
        mine = np.concatenate(expected[rank * apart // WORLD :: apart])
        for scored in told.scored:
            np.testing.assert_allclose(scored, mine, atol=WITHIN * rounding() * float(np.abs(mine).max()), rtol=0)


def test_weights_after_one_and_five_steps_are_those_of_one_rank_to_a_hundredth_of_a_step(
    ranks: list[Told], alone: World
) -> None:
    engine = alone.engine(FREE, model=MODEL)
    for count, ours in ((1, ranks[0].first), (STEPS - 1, ranks[0].last)):
        for _ in range(count):
            train(engine, [range(SAMPLES)])
        assert_moved(ours, weights(engine))


def assert_moved(ours: Tensors, theirs: Tensors) -> None:
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).norm() / tensor.norm()) < 1e-2 * FREE.learning_rate, name


def test_a_layout_repeats_itself_and_all_its_ranks_agree_bit_for_bit(ranks: list[Told]) -> None:
    for told in ranks:
        assert same_bits(told.again, told.first)
        assert same_bits(told.last, ranks[0].last) and told.norm == ranks[0].norm


def test_whole_tensors_arrive_from_the_ranks_that_hold_them(ranks: list[Told]) -> None:
    assert all(same_bits(told.sent, told.last) for told in ranks)


def test_what_an_owner_holds_is_not_sent_and_all_else_is_sent_to_it_once(ranks: list[Told]) -> None:
    whole = sum(tensor.numel() for tensor in ranks[0].last.values())
    assert sum(told.given for told in ranks) == sum(whole - told.numbers for told in ranks)


def test_one_rank_with_a_gradient_that_is_not_finite_makes_all_skip_the_step(ranks: list[Told]) -> None:
    assert [told.skipped for told in ranks] == [[1.0, 1.0]] * WORLD


def test_every_rank_holds_as_many_of_the_experts_numbers(ranks: list[Told]) -> None:
    whole = sum(tensor.numel() for name, tensor in ranks[0].last.items() if ".experts." in name)
    assert [told.held for told in ranks] == [whole // WORLD] * WORLD


def test_routers_count_what_they_choose_once_and_none_is_left_out(ranks: list[Told], alone: World) -> None:
    engine = alone.engine(FREE, TrainingConfig(layout="packed"), MODEL)
    expected = routed(computed(engine.accumulate(batch_of(range(SAMPLES)))))
    copies = WORLD // len({str(told.routed) for told in ranks})  # ranks that share layers see the same tokens
    assert copies in (1, 2)
    assert {name: sum(told.routed[name] for told in ranks) / copies for name in expected} == expected


def test_a_critic_learns_as_on_one_rank(ranks: list[Told], alone: World) -> None:
    expected = value_gradients(alone, None, range(SAMPLES))
    assert all(furthest(told.critic, expected) < 2 * WITHIN * rounding() for told in ranks)


def test_a_layout_goes_on_from_the_state_of_another(everyone: list[dict[str, tuple[Told, Tensors]]]) -> None:
    names = list(LAYOUTS)
    for told in everyone:
        for before, name in zip(names, names[1:], strict=False):
            assert same_bits(told[name][1], told[before][0].first)


def test_experts_are_found_by_the_tensors_that_hold_them() -> None:
    assert len(list(experts_of(outline_model(MODEL).model))) == MODEL.layers
    assert not list(experts_of(outline_model(SMALL).model))
