from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from fsdp_samples import (
    CPU,
    FREE,
    SAMPLES,
    SMALL,
    World,
    batch_of,
    computed,
    gradients,
    plain_gradients,
    token_count,
    train,
    weights,
)

from engines.fsdp import FSDPEngine
from engines.model import build_model
from engines.torch_rollout import TorchRollout
from harness.protocols import Sampling, TrainEngine
from harness.runtime.clock import RealClock

ALL = range(SAMPLES)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World() as world:
        yield world


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rtol: float) -> None:
    """Within rtol of the largest element of each tensor: small elements carry the rounding of large ones."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor.to(ours[name].dtype), rtol=0, atol=rtol * float(tensor.abs().max())
        )


@pytest.mark.parametrize("correction", ["none", "clip", "tis"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_those_of_the_token_mean_of_samples_taken_alone(
    world: World, correction: str, temperature: float
) -> None:
    algorithm = replace(FREE, correction=correction, temperature=temperature)
    engine = world.engine(algorithm)
    _: TrainEngine = engine
    norm = train(engine, [ALL[:8], ALL[8:]])
    model, _loss = plain_gradients(ALL, algorithm)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_close(gradients(engine), expected, rtol=1e-5)
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(expected.values())), rel=1e-5)


def test_a_step_is_that_of_plain_adamw_after_clipping(world: World) -> None:
    algorithm = replace(FREE, betas=(0.9, 0.95), grad_clip=0.05, weight_decay=0.1)
    engine = world.engine(algorithm)
    norm = train(engine, [ALL[:8], ALL[8:]])
    model, _loss = plain_gradients(ALL, algorithm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)) > 0.05, "nothing was clipped"
    optimizer.step()
    assert norm > 0.05
    before = dict(build_model(SMALL).named_parameters())
    for name, parameter in model.named_parameters():
        moved, expected = weights(engine)[name] - before[name], parameter - before[name]
        torch.testing.assert_close(moved, expected.detach(), rtol=0, atol=1e-3 * 1e-3)  # 0.1 % of the learning rate


def test_nothing_of_one_step_is_left_for_the_next(world: World) -> None:
    still = replace(FREE, learning_rate=0.0)
    twice, once = world.engine(still), world.engine(still)
    train(twice, [ALL[8:]])
    assert train(twice, [ALL[:8]]) == train(once, [ALL[:8]])


def test_the_kl_term_needs_a_coefficient_and_a_reference(world: World) -> None:
    without = replace(FREE, kl_coef=0.0)
    batch = batch_of(ALL)

    def norm(algorithm: type(FREE), batch: object = batch) -> float:
        engine = world.engine(algorithm)
        computed(engine.accumulate(batch))
        return computed(engine.step())["grad_norm"]

    assert norm(FREE) != norm(without)
    assert norm(FREE, replace(batch, ref_log_probs=None)) == norm(without)


def test_diagnostics_count_the_response_tokens(world: World) -> None:
    told = computed(world.engine(FREE).accumulate(batch_of(ALL)))
    assert told["tokens"] == token_count(ALL)
    assert {"entropy", "kl_ref", "clipped", "ratio_max"} <= told.keys()
    assert "mismatch" not in told


def test_only_tokens_of_the_recomputed_version_are_compared_with_the_engine(world: World) -> None:
    batch = batch_of(ALL)
    old_versions = np.where(np.arange(SAMPLES) < 5, 0, 1).astype(np.int32)  # tokens are of version 0
    scored = replace(batch, old_log_probs=batch.behaviour_log_probs, old_versions=old_versions)
    told = computed(world.engine(FREE).accumulate(scored))
    assert told["mismatch_tokens"] == batch.responses.lengths[:5].sum()
    assert told["mismatch"] == 0


def test_its_weights_are_float32_and_fit_a_rollout_engine(world: World) -> None:
    engine = world.engine(FREE)
    train(engine, [ALL])
    rollout = TorchRollout(
        build_model(SMALL, seed=1), sampling=Sampling(4), slots=2, seed=0, clock=RealClock.starting_now()
    )
    computed(rollout.load_weights(1, weights(engine).items()))
    assert rollout.version == 1
    assert {tensor.dtype for tensor in weights(engine).values()} == {torch.float32}


def test_a_bfloat16_model_keeps_float32_weights_that_small_steps_can_move(world: World) -> None:
    config = replace(SMALL, dtype="bfloat16")
    engine = FSDPEngine(build_model(config), replace(FREE, learning_rate=1e-6), mesh=world.mesh, device=CPU)
    before = weights(engine)
    train(engine, [ALL])
    after = weights(engine)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert all(not torch.equal(before[name], after[name]) for name in before)
