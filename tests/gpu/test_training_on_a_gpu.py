"""Training with packed micro-batches and recomputed activations on a GPU. Skipped where there is none."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, destroy_process_group
from torch.distributed.device_mesh import DeviceMesh

from engines.torch.fsdp import FSDPEngine, init_world, sharded_reference
from engines.torch.model import build_model, outline_model
from engines.torch.scoring import TorchLogProb
from harness.config import AlgorithmConfig, Layout, ModelConfig, OptimizerOffload, TrainingConfig
from harness.cost_model.memory_plan import USABLE
from harness.protocols import Scorer, TrainBatch
from harness.transfer_queue import Ragged
from tests.support.fsdp_samples import full
from tests.support.training_case import TrainingCase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda")
SMALL = ModelConfig("small", 256, 4, 4, 2, 64, 512, 1024, True, 1024)
ALGORITHM = AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, betas=(0.0, 0.95), grad_clip=1e9)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    torch.cuda.set_device(0)
    yield init_world(HashStore(), 0, 1, GPU, timeout_s=120)
    destroy_process_group()


def batch_of(config: ModelConfig, samples: int, longest: int) -> TrainBatch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, longest, samples)
    total = int(lengths.sum())

    def column(values: np.ndarray) -> Ragged:
        return Ragged(values, lengths)

    return TrainBatch(
        prompts=Ragged.from_rows([rng.integers(1, config.vocabulary, n) for n in rng.integers(1, 40, samples)]),
        responses=column(rng.integers(1, config.vocabulary, total)),
        behaviour_log_probs=column(np.full(total, -np.log(config.vocabulary), np.float32)),
        versions=column(np.zeros(total, np.int32)),
        advantages=rng.standard_normal(samples).astype(np.float32),
    )


def gradients(mesh: DeviceMesh, config: ModelConfig, training: TrainingConfig) -> dict[str, torch.Tensor]:
    engine = FSDPEngine(outline_model(config), ALGORITHM, mesh=mesh, device=GPU, training=training)
    asyncio.run(engine.accumulate(batch_of(config, 12, 90)))
    asyncio.run(engine.step())
    state = engine._optimizer.state
    return {name: full(state[weight]["exp_avg"]) for name, weight in engine.masters.items()}


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-2), ("bfloat16", 0.1)])
@pytest.mark.parametrize("recompute", [True, False])
def test_packed_gradients_are_those_of_padded_ones(mesh: DeviceMesh, dtype: str, rtol: float, recompute: bool) -> None:
    """In bfloat16 by torch's kernel for sequences of different lengths, in float32 sample by sample."""
    config = replace(SMALL, dtype=dtype)
    packed = gradients(mesh, config, TrainingConfig(layout="packed", recompute_activations=recompute))
    padded = gradients(mesh, config, TrainingConfig())
    for name, expected in padded.items():
        error = (packed[name] - expected).norm() / expected.norm()
        assert error < rtol, f"{name}: {error:.3f}"


@pytest.mark.parametrize("recompute", [True, False])
def test_training_stays_within_a_device_that_has_what_is_planned(mesh: DeviceMesh, recompute: bool) -> None:
    """A tenth more is enough, as plans leave it, beside the workspace of products; three quarters are not."""
    case = TrainingCase(
        1, recompute=recompute, hidden=1024, ff=4096, layers=8, vocabulary=32768, response=500, gpu=True
    )
    planned, total = max(case.planned.values()), torch.cuda.get_device_properties(0).total_memory

    def train(bytes_: float) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + bytes_) / total)
        engine = FSDPEngine(outline_model(case.model), ALGORITHM, mesh=mesh, device=GPU, training=case.training)
        for _ in range(2):
            asyncio.run(engine.accumulate(case.batch))
            asyncio.run(engine.step())

    try:
        train(planned / USABLE + _WORKSPACE)
        with pytest.raises(torch.OutOfMemoryError):
            train(0.75 * planned)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


_WORKSPACE = 128 << 20
"""Bytes that cuBLAS takes of torch's allocator, at most, for all of its handles."""


def scores(scorer: Scorer, batch: TrainBatch) -> np.ndarray:
    return asyncio.run(scorer.log_probs(batch.prompts, batch.responses)).values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_trainer_scores_as_an_engine_with_its_weights(mesh: DeviceMesh, dtype: str, layout: Layout) -> None:
    config, training = replace(SMALL, dtype=dtype), TrainingConfig(layout=layout)
    batch = batch_of(config, 12, 90)
    engine = FSDPEngine(outline_model(config), ALGORITHM, mesh=mesh, device=GPU, training=training)
    asyncio.run(engine.accumulate(batch))
    before = scores(engine.scorer(), batch)
    asyncio.run(engine.step())
    alone = TorchLogProb(build_model(config), temperature=1.0, device=GPU, training=TrainingConfig(layout=layout))
    np.testing.assert_array_equal(before, scores(alone, batch))
    sent = {name: full(parameter) for name, parameter in engine.named_parameters().items()}
    asyncio.run(alone.load_weights(1, sent.items()))
    after = scores(engine.scorer(), batch)
    np.testing.assert_array_equal(after, scores(alone, batch))
    assert not np.array_equal(before, after)


def test_an_offloaded_reference_scores_the_same_and_rests_in_host_memory(mesh: DeviceMesh) -> None:
    config = replace(SMALL, dtype="bfloat16", layers=12)
    batch = batch_of(config, 12, 90)
    alone = scores(TorchLogProb(build_model(config), temperature=1.0, device=GPU), batch)
    for offload in (False, True):
        before = torch.cuda.memory_allocated()
        training = TrainingConfig(reference_offload=offload)
        reference = sharded_reference(outline_model(config), mesh=mesh, device=GPU, temperature=1.0, training=training)
        for _ in range(2):
            np.testing.assert_array_equal(scores(reference, batch), alone)
        held = torch.cuda.memory_allocated() - before
        whole = sum(parameter.numel() * 2 for parameter in build_model(config).parameters())
        assert held < 0.1 * whole if offload else held >= whole
        del reference


def test_moments_that_rest_on_the_host_free_their_bytes_and_change_no_bit(mesh: DeviceMesh) -> None:
    batch, algorithm = batch_of(SMALL, 12, 90), replace(ALGORITHM, betas=(0.9, 0.95))
    held, after = {}, {}
    offloads: list[OptimizerOffload] = ["none", "between_phases", "always"]
    for offload in offloads:
        before = torch.cuda.memory_allocated()
        training = TrainingConfig(optimizer_offload=offload)
        engine = FSDPEngine(outline_model(SMALL), algorithm, mesh=mesh, device=GPU, training=training)
        for _ in range(3):
            asyncio.run(engine.accumulate(batch))
            asyncio.run(engine.step())
        held[offload] = torch.cuda.memory_allocated() - before
        after[offload] = {name: full(parameter).cpu() for name, parameter in engine.masters.items()}
        del engine
    numbers = sum(tensor.numel() for tensor in after["none"].values())
    for offload in offloads[1:]:
        assert all(torch.equal(after[offload][name], tensor) for name, tensor in after["none"].items())
        assert held["none"] - held[offload] > 0.9 * 8 * numbers
