"""Micro-batches by tokens, steps that are skipped, the learning rate: alone, and in a world of two ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from engines.torch.fsdp import FSDPEngine
from engines.torch.model import build_model
from engines.torch.scoring import TorchLogProb
from harness.config import TrainingConfig
from harness.protocols import Scorer, TrainBatch
from harness.transfer_queue import Ragged
from tests.support.fsdp_samples import (
    CPU,
    FREE,
    SAMPLES,
    SMALL,
    World,
    assert_close,
    batch_of,
    computed,
    gradients,
    save,
    train,
    weights,
)
from tests.support.processes import run_in_processes

ALL = range(SAMPLES)
LIMIT = 40  # tokens; samples have 2 to 19
SHARES = [
    sorted(ALL, key=lambda sample: len(batch_of([sample]).responses.values))[start : start + 8] for start in (0, 8)
]
"""Of two ranks: the short samples, and the long ones."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World() as world:
        yield world


def counted(engine: Any) -> list[list[int]]:
    """Grows by the tokens of each sample of each forward pass."""
    passes: list[list[int]] = []
    lay_out = engine._scorer.lay_out

    def counting(prompts: Ragged, responses: Ragged, *others: Any) -> Any:
        passes.append((prompts.lengths + responses.lengths).tolist())
        return lay_out(prompts, responses, *others)

    engine._scorer.lay_out = counting
    return passes


def scores(scorer: Scorer, samples: Sequence[int]) -> np.ndarray:
    batch = batch_of(samples)
    found = computed(scorer.log_probs(batch.prompts, batch.responses))
    assert found.lengths.tolist() == batch.responses.lengths.tolist()
    return found.values


def broken(batch: TrainBatch) -> TrainBatch:
    """Its loss is NaN."""
    return replace(batch, advantages=np.full(len(batch.advantages), np.nan, np.float32))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_parts_of_a_micro_batch_have_its_gradient_and_say_the_same_of_themselves(world: World, layout: str) -> None:
    whole = world.engine(FREE, TrainingConfig(layout=layout))
    cut = world.engine(FREE, TrainingConfig(layout=layout, tokens_per_micro_batch=LIMIT))
    passes = counted(cut)
    told = [computed(engine.accumulate(batch_of(ALL))) for engine in (whole, cut)]
    norms = [computed(engine.step())["grad_norm"] for engine in (whole, cut)]
    assert len(passes) > 3 and sum(map(len, passes)) == SAMPLES
    assert told[0] == pytest.approx(told[1], rel=1e-5) and norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_close(gradients(cut), gradients(whole), rtol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_scoring_in_parts_finds_the_same_beside_the_trainer_as_a_reference_and_alone(world: World, layout: str) -> None:
    limited = TrainingConfig(layout=layout, tokens_per_micro_batch=LIMIT)

    def scorers(training: TrainingConfig) -> list[Any]:
        alone = TorchLogProb(build_model(SMALL), temperature=1.0, device=CPU, training=training)
        return [world.engine(FREE, training).scorer(), world.reference(training=training), alone]

    for cut, whole in zip(scorers(limited), scorers(TrainingConfig(layout=layout)), strict=True):
        tokens = counted(cut)
        np.testing.assert_allclose(scores(cut, ALL), scores(whole, ALL), rtol=0, atol=2e-6)
        assert len(tokens) > 3 and sum(map(len, tokens)) == SAMPLES
        assert all((sum(of) if layout == "packed" else max(of) * len(of)) <= LIMIT for of in tokens)


def one_rank_of_two(rank: int, port: int) -> tuple[list[int], dict[str, torch.Tensor], list[dict[str, float]]]:
    """Passes of a step in parts, and of scoring by trainer and reference; gradients of that step; then what the steps
    said of which one was broken on rank 0 only."""
    store = TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
    with World(store, rank, 2) as world:
        limited = TrainingConfig(tokens_per_micro_batch=LIMIT)
        engine, reference = world.engine(FREE, limited), world.reference(training=limited)
        passes = [counted(engine), counted(reference)]
        for scorer in (engine.scorer(), reference):
            alone = TorchLogProb(build_model(SMALL), temperature=1.0, device=CPU)
            np.testing.assert_allclose(scores(scorer, SHARES[rank]), scores(alone, SHARES[rank]), rtol=0, atol=2e-6)
        train(engine, [SHARES[rank]])
        found = gradients(engine)
        before, said = weights(engine), []
        for bad in (True, False):
            batch = batch_of(SHARES[rank])
            computed(engine.accumulate(broken(batch) if bad and rank == 0 else batch))
            said.append(computed(engine.step()))
            same = all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())
            assert same == bad, "only a step that is skipped leaves the weights as they are"
        return [len(each) for each in passes], found, said


def test_two_ranks_make_as_many_passes_and_skip_the_same_steps(world: World) -> None:
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    ranks = run_in_processes(one_rank_of_two, [(rank, store.port) for rank in range(2)], timeout_s=200)
    whole = world.engine(FREE)
    train(whole, [ALL])
    (trainers, references), there = (passes for passes, _, _ in ranks)
    assert [trainers, references] == there
    assert references > 3 and trainers == 4 * references, "the trainer scored once, and took part in three steps"
    for _, found, said in ranks:
        assert_close(found, gradients(whole), rtol=1e-5)
        assert [step["skipped"] for step in said] == [1.0, 0.0]


def test_each_step_has_the_rate_of_its_place_in_the_run_also_after_a_checkpoint(world: World, tmp_path: Path) -> None:
    algorithm = replace(FREE, learning_rate=1.0, warmup_steps=2, decay="linear")
    engine = FSDPEngine(build_model(SMALL), algorithm, mesh=world.mesh, device=torch.device("cpu"), steps=5)
    resumed = FSDPEngine(build_model(SMALL), algorithm, mesh=world.mesh, device=torch.device("cpu"), steps=5)

    def rate(engine: FSDPEngine) -> float:
        computed(engine.accumulate(batch_of(ALL)))
        return computed(engine.step())["learning_rate"]

    assert [rate(engine) for _ in range(3)] == [0.5, 1.0, 1.0]
    save(engine, tmp_path / "third")
    computed(resumed.load(tmp_path / "third"))
    assert [rate(resumed) for _ in range(2)] == [0.5, 0.0]
