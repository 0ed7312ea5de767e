"""When two training runs are equal, and by how much they may differ where they are not: docs/equivalence.md."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import Store

from harness.config import AlgorithmConfig
from harness.weight_sync.endpoints import GatherOnlySender
from harness.weight_sync.ipc import SharedOffer, share_slots
from harness.weight_sync.plan import plan_transfer
from harness.weight_sync.process_group import open_rendezvous
from tests.support.fsdp_samples import (
    FREE,
    SAMPLES,
    Tensors,
    World,
    computed,
    gradients,
    plain_gradients,
    same_bits,
    token_count,
    train,
    weights,
)
from tests.support.processes import run_ranks

U = 2.0**-24
"""Unit roundoff of float32."""
EPS = 1e-8
"""AdamW's."""
CLIPPED = replace(FREE, grad_clip=0.05, weight_decay=0.1)
MICRO_BATCHES = [range(first, first + 2) for first in range(0, SAMPLES, 2)]
BY_RANK = [MICRO_BATCHES[0::2], MICRO_BATCHES[1::2]]
"""What the queue gives a world of two: micro-batches in turn."""


# --- the bounds of docs/equivalence.md -------------------------------------------------------------------------------


def gamma(n: int) -> float:
    """n roundings in a row change a number by at most this factor of it: Higham (2002), lemma 3.1."""
    return n * U / (1 - n * U)


def gradient_bound(parts: Sequence[Tensors]) -> Tensors:
    """Section 2: two orders of adding up micro-batch gradients `parts` (of the token mean) differ by at most this."""
    return {name: 2 * gamma(len(parts) + 2) * sum(part[name].double().abs() for part in parts) for name in parts[0]}


def norm_bound(gradient: Tensors, difference: Tensors) -> float:
    """Section 3: how far the norms of two gradients that differ by `difference` may be apart, as computed."""
    elements = sum(tensor.numel() for tensor in gradient.values())
    return norm(difference) + 2 * gamma(elements + 2) * (norm(gradient) + norm(difference))


def step_bound(gradient: Tensors, difference: Tensors, algorithm: AlgorithmConfig, before: Tensors) -> Tensors:
    """Section 3: the first steps of AdamW on two such gradients (before clipping) end at most this far apart."""
    total, lr = norm(gradient), algorithm.learning_rate
    coefficient = min(1.0, algorithm.grad_clip / (total + 1e-6))
    relative = norm_bound(gradient, difference) / total if coefficient < 1 else 0.0
    bound = {}
    for name, weight in before.items():
        g = coefficient * gradient[name].double().abs()
        d = coefficient * difference[name] + (relative + 4 * U) * (g + coefficient * difference[name])
        near = torch.minimum(d / EPS, torch.full_like(d, 2.0))
        far = EPS * d / (g - d + EPS) ** 2
        direction = torch.where(g > d, torch.minimum(near, far), near)
        bound[name] = lr * (direction + 2 * gamma(12)) + 2 * gamma(3) * (weight.double().abs() + 2 * lr)
    return bound


def norm(tensors: Tensors) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).sum().sqrt())


def differences(ours: Tensors, theirs: Tensors) -> Tensors:
    return {name: (ours[name].double() - theirs[name].double()).abs() for name in ours}


def worst(measured: Tensors, bound: Tensors) -> float:
    """The largest share of the bound that was used; inf where there was none to use."""
    shares = [(measured[name] / bound[name]).nan_to_num(nan=0.0, posinf=torch.inf).max() for name in measured]
    return float(torch.stack(shares).max())


def within(measured: Tensors, bound: Tensors) -> bool:
    return all(bool((measured[name] <= bound[name]).all()) for name in measured)


# --- runs ------------------------------------------------------------------------------------------------------------


def one_rank_of_two(store: Store, rank: int, offer: SharedOffer) -> tuple[Tensors, Tensors, float, Tensors]:
    """Gradients, norm and weights of a step in a world of two, the clipped step's weights last; rank 0 sends those."""
    with World(store, rank, 2) as world:
        free = world.engine(FREE)
        norm = train(free, BY_RANK[rank])
        clipped = world.engine(CLIPPED)
        train(clipped, BY_RANK[rank])
        rendezvous = offer.rendezvous
        joined = rendezvous.connect()
        sender = offer.sender(joined, torch.device("cpu")) if rank == 0 else GatherOnlySender(offer.plan)
        computed(sender.send(1, clipped.named_parameters()))
        return gradients(free), weights(free), norm, weights(clipped)


@pytest.fixture(scope="module")
def two_ranks(world: World) -> Iterator[tuple[list[Any], Tensors]]:
    """What both ranks returned, and the weights that arrived through shared memory."""
    rendezvous, _meets_here = open_rendezvous("127.0.0.1", receivers=1, timeout_s=200)
    offer = share_slots(plan_transfer(world.engine(FREE).named_parameters().items(), bucket_bytes=4096), rendezvous)
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run_ranks, one_rank_of_two, 2, offer)
            receiver = offer.receiver(0, torch.device("cpu"))
            arrived = {name: tensor.clone() for name, tensor in receiver.receive(1)}
            ranks = running.result()
    finally:
        offer.withdraw()
    yield ranks, arrived


@pytest.fixture(scope="module")
def parts(world: World) -> list[Tensors]:
    """The gradient of each micro-batch on its own, over the tokens of all."""
    tokens = token_count(range(SAMPLES))
    parts = []
    for samples in MICRO_BATCHES:
        engine = world.engine(FREE)
        train(engine, [samples])
        share = token_count(samples) / tokens
        parts.append({name: gradient.double() * share for name, gradient in gradients(engine).items()})
    return parts


def trained(
    world: World, algorithm: AlgorithmConfig, micro_batches: Sequence[Sequence[int]]
) -> tuple[Tensors, Tensors, float]:
    engine = world.engine(algorithm)
    norm = train(engine, micro_batches)
    return gradients(engine), weights(engine), norm


# --- section 1: bitwise ----------------------------------------------------------------------------------------------


def test_the_same_micro_batches_in_the_same_order_give_the_same_bits(world: World) -> None:
    one, again = (trained(world, CLIPPED, MICRO_BATCHES) for _ in range(2))
    assert same_bits(one[0], again[0]) and same_bits(one[1], again[1]) and one[2] == again[2]


def test_both_ranks_hold_the_same_weights_bit_for_bit(two_ranks: tuple[list[Any], Tensors]) -> None:
    (first, second), _ = two_ranks
    assert same_bits(first[1], second[1]) and same_bits(first[3], second[3]) and first[2] == second[2]


def test_weights_gathered_from_two_ranks_arrive_bit_for_bit(two_ranks: tuple[list[Any], Tensors]) -> None:
    ((_, _, _, sent), _), arrived = two_ranks
    assert same_bits(sent, arrived)


# --- section 2: another order, another world -------------------------------------------------------------------------


def test_gradients_in_another_order_differ_by_less_than_the_bound(world: World, parts: list[Tensors]) -> None:
    forwards, backwards = (trained(world, FREE, order) for order in (MICRO_BATCHES, MICRO_BATCHES[::-1]))
    assert not same_bits(forwards[0], backwards[0]), "the order did not matter: the test shows nothing"
    assert within(differences(forwards[0], backwards[0]), gradient_bound(parts))


def test_gradients_of_two_ranks_differ_from_those_of_one_by_less_than_the_bound(
    world: World, two_ranks: tuple[list[Any], Tensors], parts: list[Tensors]
) -> None:
    ours, (theirs, *_), bound = trained(world, FREE, MICRO_BATCHES)[0], two_ranks[0][0], gradient_bound(parts)
    assert worst(differences(ours, theirs), bound) < 1


def test_the_gradient_bound_would_catch_a_scale_that_is_off_by_a_permille(world: World, parts: list[Tensors]) -> None:
    ours, bound = trained(world, FREE, MICRO_BATCHES)[0], gradient_bound(parts)
    wrong = {name: gradient * 1.001 for name, gradient in ours.items()}
    caught = torch.cat([(differences(ours, wrong)[name] > bound[name]).flatten() for name in ours])
    assert caught.double().mean() > 0.95


# --- section 3: the step that follows --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [FREE, CLIPPED], ids=["free", "clipped"])
def test_weights_of_two_ranks_differ_from_those_of_one_by_less_than_the_bound(
    world: World, two_ranks: tuple[list[Any], Tensors], parts: list[Tensors], algorithm: AlgorithmConfig
) -> None:
    free, norm_of_one, bound = *trained(world, FREE, MICRO_BATCHES)[0::2], gradient_bound(parts)
    _, theirs_free, norm_of_two, theirs_clipped = two_ranks[0][0]
    assert abs(norm_of_one - norm_of_two) <= norm_bound(free, bound)
    ours = trained(world, algorithm, MICRO_BATCHES)[1]
    theirs = theirs_free if algorithm is FREE else theirs_clipped
    before = weights(world.engine(algorithm))
    allowed = step_bound(free, bound, algorithm, before)
    assert worst(differences(ours, theirs), allowed) < 1


@pytest.mark.parametrize("algorithm", [FREE, CLIPPED], ids=["free", "clipped"])
def test_the_weight_bound_is_far_below_a_step(world: World, parts: list[Tensors], algorithm: AlgorithmConfig) -> None:
    free, bound = trained(world, FREE, MICRO_BATCHES)[0], gradient_bound(parts)
    before = weights(world.engine(algorithm))
    allowed = torch.cat([b.flatten() for b in step_bound(free, bound, algorithm, before).values()])
    assert allowed.median() < 0.01 * algorithm.learning_rate
    assert (allowed < 0.1 * algorithm.learning_rate).double().mean() > 0.95


# --- section 4: other rectangles -------------------------------------------------------------------------------------


def rectangle_tolerance(world: World) -> Tensors:
    """Section 4: K samples' own errors against float64, each as its tensor's largest, added up, twice."""
    tokens = token_count(range(SAMPLES))
    tolerance: Tensors = {}
    for sample in range(SAMPLES):
        share = token_count([sample]) / tokens
        ours = trained(world, FREE, [[sample]])[0]
        for name, exact in plain_gradients([sample], FREE, torch.float64).items():
            own_error = (ours[name].double() - exact).abs().max()
            adding = gamma(SAMPLES + 2) * exact.abs()
            tolerance[name] = tolerance.get(name, 0.0) + 2 * share * (own_error + adding)
    return tolerance


def test_whole_batch_and_micro_batches_agree_within_the_tolerance_and_a_percent_would_not(world: World) -> None:
    tolerance = rectangle_tolerance(world)
    split = trained(world, FREE, MICRO_BATCHES)[0]
    whole = trained(world, FREE, [range(SAMPLES)])[0]
    assert worst(differences(split, whole), tolerance) < 1
    for name, gradient in whole.items():
        assert (0.01 * gradient.double().abs().max()) > tolerance[name].max(), name


def test_micro_batches_are_as_near_to_float64_as_the_whole_batch(world: World) -> None:
    tolerance = rectangle_tolerance(world)
    exact = plain_gradients(range(SAMPLES), FREE, torch.float64)
    for micro_batches in (MICRO_BATCHES, [range(SAMPLES)]):
        assert worst(differences(trained(world, FREE, micro_batches)[0], exact), tolerance) < 1
