"""Several optimizer steps a batch, of a real trainer: docs/algorithms.md, "Several steps a batch"."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.config import AlgorithmConfig
from harness.transfer_queue import Batch, Ragged
from harness.workers.actor import ActorRole
from harness.workers.dataflow import text_column
from harness.workers.readers import Deadlines
from harness.workers.training import Updates
from tests.support.fsdp_samples import CPU, FREE, SAMPLES, Tensors, World, batch_of, computed, weights
from tests.support.role_setting import TickingClock

PARTS, EPOCHS = 4, 2
PART = SAMPLES // PARTS
DECOUPLED = replace(FREE, correction="decoupled", options={"cap": None}, proximal="trainer", betas=(0.9, 0.95))
CLIP = replace(FREE, correction="clip", betas=(0.9, 0.95))

Cut = Sequence[Sequence[int]]
ONE_BY_ONE: Cut = [[sample] for sample in range(SAMPLES)]
UNEVEN: Cut = [list(range(first + a, first + b)) for first in range(0, SAMPLES, PART) for a, b in ((0, 3), (3, 4))]
WHOLE: Cut = [list(range(first, first + PART)) for first in range(0, SAMPLES, PART)]


class Given:
    """Reads these micro-batches."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut

    async def read(self, iteration: int, first: Deadlines) -> AsyncIterator[Batch]:
        for samples in self.cut:
            yield rows_of(samples)


def rows_of(samples: Sequence[int]) -> Batch:
    batch, count = batch_of(samples), len(samples)
    tokens = len(batch.responses.values)
    times = ("admitted_at", "started_at", "first_token_at", "finished_at")
    zeros = {name: np.zeros(count) for name in ("reward", *times)}
    return Batch(
        "train_0",
        np.array(samples),
        {
            "prompt": batch.prompts, "response": batch.responses, "log_probs": batch.behaviour_log_probs,
            "versions": batch.versions, "advantage": batch.advantages, "ref_log_probs": batch.ref_log_probs,
            "loss_mask": Ragged(np.ones(tokens, np.bool_), batch.responses.lengths),
            **{name: np.zeros(count, np.int32) for name in ("engine", "finish_reason", "turns")},
            "exact_match": np.zeros(count, np.bool_), "reward_failure": text_column([""] * count), **zeros,
        },
        lease=0,
    )  # fmt: skip


def trained(world: World, algorithm: AlgorithmConfig, cut: Cut, parts: int = PARTS) -> Tensors:
    """Weights after one batch."""
    engine = world.engine(algorithm)
    frozen = algorithm.correction == "decoupled"
    updates = Updates(SAMPLES // parts, EPOCHS, whole_batch=frozen, scorer=engine.scorer() if frozen else None)
    role = ActorRole(engine, TickingClock(), rank=0, reader=Given(cut), device=CPU, updates=updates)
    report = asyncio.run(role.train(0))
    assert len(report.steps) == parts * EPOCHS
    return weights(engine)


def moved(ours: Tensors, theirs: Tensors) -> float:
    """The share of weights that are apart by more than a hundredth of a step: a gradient near zero, rounded otherwise,
    may turn AdamW's step of a single weight."""
    apart = [(ours[name] - theirs[name]).abs() > 0.01 * float(FREE.learning_rate) for name in theirs]
    return float(torch.cat([each.flatten() for each in apart]).double().mean())


def test_the_loss_stays_near_the_policy_before_the_first_step_of_the_batch() -> None:
    """By hand: scores of an engine that makes no step, then every mini-batch of every epoch against those."""
    with World() as world:
        engine, untouched = world.engine(DECOUPLED), world.engine(DECOUPLED).scorer()
        for _ in range(EPOCHS):
            for samples in WHOLE:
                batch = batch_of(samples)
                frozen = computed(untouched.log_probs(batch.prompts, batch.responses))
                computed(engine.accumulate(replace(batch, proximal_log_probs=frozen, old_log_probs=None)))
                computed(engine.step())
        ours, by_hand = trained(world, DECOUPLED, WHOLE), weights(engine)
        assert all(torch.equal(ours[name], by_hand[name]) for name in by_hand)


@pytest.mark.parametrize("algorithm", [CLIP, DECOUPLED], ids=["clip", "decoupled"])
def test_weights_depend_on_how_many_mini_batches_there_are_not_on_how_they_are_cut(algorithm: AlgorithmConfig) -> None:
    with World() as world:
        whole = trained(world, algorithm, WHOLE)
        for cut in (ONE_BY_ONE, UNEVEN):
            assert moved(trained(world, algorithm, cut), whole) < 1e-3
        assert moved(trained(world, algorithm, WHOLE, parts=2), whole) > 0.5
