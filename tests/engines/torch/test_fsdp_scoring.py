"""Scoring by the trainer's own parameters, and by a reference that is sharded beside it: the bits of a scorer alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.distributed import Store

from engines.torch.fsdp import FSDPEngine
from engines.torch.model import build_model
from engines.torch.scoring import TorchLogProb
from harness.config import Layout, ModelConfig, TrainingConfig
from harness.protocols import Scorer
from tests.support.fsdp_samples import (
    CPU,
    FREE,
    SCORED,
    SMALL,
    Tensors,
    World,
    batch_of,
    computed,
    full,
    same_bits,
    scores,
    train,
    weights,
)
from tests.support.processes import run_ranks

BFLOAT16 = replace(SMALL, dtype="bfloat16")
MODELS = {"float32": SMALL, "bfloat16": BFLOAT16}
ALGORITHM = replace(FREE, temperature=1.0, betas=(0.9, 0.95))
FIRST, SECOND = range(0, 5), range(5, 12)


def squares_of(scorer: Scorer) -> np.ndarray:
    """That come with the same log-probs."""
    batch = batch_of(SCORED)
    log_probs, squares = computed(scorer.gradient_squares(batch.prompts, batch.responses))
    np.testing.assert_array_equal(log_probs.values, scores(scorer))
    assert squares.lengths.tolist() == batch.responses.lengths.tolist() and squares.values.dtype == np.float32
    return squares.values


def sent_to(sent: Tensors, model: ModelConfig, layout: Layout = "padded") -> TorchLogProb:
    """With these weights, received."""
    training = TrainingConfig(layout=layout)
    scorer = TorchLogProb(build_model(model, seed=9), temperature=1.0, device=CPU, training=training)
    computed(scorer.load_weights(1, sent.items()))
    return scorer


def alone(sent: Tensors, model: ModelConfig, layout: Layout = "padded") -> np.ndarray:
    """By a scorer that was sent these weights."""
    return scores(sent_to(sent, model, layout))


def sent(engine: FSDPEngine) -> Tensors:
    return {name: full(parameter) for name, parameter in engine.named_parameters().items()}


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return request.param


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_trainer_scores_as_an_engine_that_was_sent_its_weights(
    world: World, model: ModelConfig, layout: Layout, recompute: bool
) -> None:
    training = TrainingConfig(layout=layout, recompute_activations=recompute)
    engine = world.engine(ALGORITHM, training, model)
    scorer = engine.scorer()
    before = scores(scorer)
    np.testing.assert_array_equal(before, alone(sent(engine), model, layout))
    train(engine, [FIRST])
    after = scores(scorer)
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, alone(sent(engine), model, layout))


@pytest.mark.parametrize("training", [TrainingConfig(), TrainingConfig(layout="packed", tokens_per_micro_batch=24)])
def test_squares_of_gradients_come_with_log_probs(world: World, model: ModelConfig, training: TrainingConfig) -> None:
    found = squares_of(world.engine(ALGORITHM, training, model).scorer())
    alone = TorchLogProb(build_model(model), temperature=1.0, device=CPU, training=training)
    np.testing.assert_array_equal(found, squares_of(alone))
    nearly = 1 - 2 * np.exp(scores(alone))  # less the sum of squares, which is that of 32 nearly equal ones
    np.testing.assert_allclose(found, nearly + 1 / SMALL.vocabulary, atol=0.02)


def test_scoring_leaves_nothing_gathered_and_nothing_to_prefetch(world: World) -> None:
    engine = world.engine(ALGORITHM, model=BFLOAT16)
    scores(engine.scorer())
    inner = engine._scorer
    states = inner._get_fsdp_state()._state_ctx.all_states
    groups = [group for state in states for group in state._fsdp_param_groups]
    assert groups and all(group.is_sharded and not group._post_forward_indices for group in groups)
    assert not inner._get_fsdp_state()._comm_ctx.post_forward_order


def test_scoring_in_the_middle_of_a_step_changes_no_bit_of_it(world: World, model: ModelConfig) -> None:
    disturbed, left_alone = (world.engine(ALGORITHM, model=model) for _ in range(2))
    norms = trained_and_scored(disturbed, FIRST, SECOND)
    assert norms == [train(left_alone, [FIRST, SECOND]) for _ in range(2)]
    assert same_bits(weights(disturbed), weights(left_alone))


def test_a_sharded_reference_scores_as_one_alone_and_stays_as_it_is(world: World, model: ModelConfig) -> None:
    reference, engine = world.reference(model, seed=4), world.engine(ALGORITHM, model=model)
    one_alone = scores(TorchLogProb(build_model(model, seed=4), temperature=1.0, device=CPU))
    np.testing.assert_array_equal(scores(reference), one_alone)
    train(engine, [FIRST])
    np.testing.assert_array_equal(scores(reference), one_alone)


def test_without_a_process_group_a_float32_trainer_does_the_same(world: World) -> None:
    alone_here = FSDPEngine(build_model(SMALL), ALGORITHM, mesh=None, device=CPU)
    with_group = world.engine(ALGORITHM)
    assert train(alone_here, [FIRST, SECOND]) == train(with_group, [FIRST, SECOND])
    assert same_bits(weights(alone_here), weights(with_group))
    with pytest.raises(ValueError, match=r"torch.bfloat16 is trained in mixed precision, which needs a mesh"):
        FSDPEngine(build_model(BFLOAT16), ALGORITHM, mesh=None, device=CPU)


def test_after_a_load_that_broke_off_nothing_is_scored_until_a_complete_one() -> None:
    scorer = TorchLogProb(build_model(SMALL), temperature=1.0, device=CPU)
    new = {name: parameter.detach() for name, parameter in build_model(SMALL, seed=1).named_parameters()}

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(new.items()))
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError):
        computed(scorer.load_weights(4, broken()))
    with pytest.raises(RuntimeError, match="log-prob engine: version 4 was put in place in part only"):
        scores(scorer)
    computed(scorer.load_weights(5, new.items()))
    assert scorer.version == 5
    np.testing.assert_array_equal(scores(scorer), alone(new, SMALL))


# -- several ranks


def trained_and_scored(engine: FSDPEngine, first: Sequence[int], second: Sequence[int]) -> list[float]:
    """The norms of two steps, with scoring wherever there is room for it."""
    scorer, norms = engine.scorer(), []
    for _ in range(2):
        scores(scorer)
        computed(engine.accumulate(batch_of(first)))
        scores(scorer, FIRST)
        scores(scorer)
        computed(engine.accumulate(batch_of(second)))
        scores(scorer)
        norms.append(computed(engine.step())["grad_norm"])
    return norms


@dataclass
class Seen:
    """What one rank saw: scores before and after two steps, both steps' norms, weights as sent; the norms of the same
    steps without scoring; scores of a reference, and how much of it the rank held; squares of gradients, after."""

    before: np.ndarray
    after: np.ndarray
    norms: list[float]
    sent: Tensors
    undisturbed: list[float]
    reference: np.ndarray
    held: int
    squares: np.ndarray


def one_rank(store: Store, rank: int, world: int, tensor_parallel: int) -> dict[str, Seen]:
    training = TrainingConfig(tensor_parallel=tensor_parallel)
    part = rank // tensor_parallel
    mine = FIRST[part::2], SECOND[part::2]
    seen = {}
    with World(store, rank, world, tensor_parallel) as there:
        for name, model in MODELS.items():
            engine, plain = (there.engine(ALGORITHM, training, model) for _ in range(2))
            before = scores(engine.scorer())
            norms = trained_and_scored(engine, *mine)
            undisturbed = [train(plain, mine) for _ in range(2)]
            after = scores(engine.scorer())
            squares = squares_of(engine.scorer())
            reference = there.reference(model, training, seed=4)
            held = sum(p.to_local().numel() for p in reference._scorer.model.parameters())
            seen[name] = Seen(before, after, norms, sent(engine), undisturbed, scores(reference), held, squares)
            assert same_bits(weights(engine), weights(plain))
    return seen


@cache
def two_ranks() -> list[dict[str, Seen]]:
    return run_ranks(one_rank, 2, 2, 1)


@cache
def four_ranks() -> list[dict[str, Seen]]:
    return run_ranks(one_rank, 4, 4, 2)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_score_each_its_own_samples_bit_for_bit_as_one_alone(name: str) -> None:
    for seen in (rank[name] for rank in two_ranks()):
        np.testing.assert_array_equal(seen.after, alone(seen.sent, MODELS[name]))
        first = {name: tensor.detach() for name, tensor in build_model(MODELS[name]).named_parameters()}
        np.testing.assert_array_equal(seen.before, alone(first, MODELS[name]))
        assert not np.array_equal(seen.before, seen.after)
        one_alone = scores(TorchLogProb(build_model(MODELS[name], seed=4), temperature=1.0, device=CPU))
        np.testing.assert_array_equal(seen.reference, one_alone)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [two_ranks, pytest.param(four_ranks, marks=pytest.mark.slow)])
def test_scoring_on_several_ranks_changes_no_bit_of_it(ranks: Callable[[], list[dict[str, Seen]]], name: str) -> None:
    for seen in (rank[name] for rank in ranks()):
        assert seen.norms == seen.undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_share_layers_score_alike_and_as_one_alone_but_for_rounding(name: str) -> None:
    bound = 2e-6 if name == "float32" else 3e-2
    ranks = [rank[name] for rank in four_ranks()]
    for one, other in (ranks[:2], ranks[2:]):
        np.testing.assert_array_equal(one.after, other.after)
        np.testing.assert_array_equal(one.reference, other.reference)
        np.testing.assert_array_equal(one.squares, other.squares)
    for seen in ranks:
        np.testing.assert_allclose(seen.after, alone(seen.sent, MODELS[name]), rtol=0, atol=bound)
        np.testing.assert_allclose(seen.squares, squares_of(sent_to(seen.sent, MODELS[name])), rtol=0, atol=bound)


def test_each_rank_holds_its_part_of_the_reference() -> None:
    everything = sum(parameter.numel() for parameter in build_model(SMALL).parameters())
    assert sum(rank["float32"].held for rank in two_ranks()) == everything
