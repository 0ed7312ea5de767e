"""Training with packed micro-batches and recomputed activations on a GPU. Skipped where there is none."""

from __future__ import annotations

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
from harness.calibration.profile.fitting import fit_profile
from harness.calibration.profile.record import Grid, record
from harness.calibration.profile.rows import PHASES
from harness.calibration.profile.timing import Stopwatch
from harness.config import (
    AlgorithmConfig,
    CostConfig,
    Layout,
    LengthsConfig,
    ModelConfig,
    OptimizerOffload,
    TrainingConfig,
)
from harness.protocols import Scorer, TrainBatch
from harness.transfer_queue import Ragged
from tests.support.fsdp_samples import full

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

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


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-2), ("bfloat16", 0.1)])
def test_packed_log_probs_are_those_of_padded_ones(dtype: str, atol: float) -> None:
    config = replace(SMALL, dtype=dtype)
    batch = batch_of(config, 12, 90)
    layouts: tuple[Layout, ...] = ("packed", "padded")
    packed, padded = [
        asyncio.run(
            TorchLogProb(
                build_model(config), temperature=1.0, device=GPU, training=TrainingConfig(layout=layout)
            ).log_probs(batch.prompts, batch.responses)
        )
        for layout in layouts
    ]
    np.testing.assert_allclose(packed.values, padded.values, atol=atol)


def test_recomputed_activations_take_less_memory(mesh: DeviceMesh) -> None:
    config, peaks = replace(SMALL, dtype="bfloat16", layers=12), []
    for recompute in (True, False):
        training = TrainingConfig(recompute_activations=recompute)
        engine = FSDPEngine(outline_model(config), ALGORITHM, mesh=mesh, device=GPU, training=training)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        asyncio.run(engine.accumulate(batch_of(config, 32, 400)))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < 0.5 * peaks[1]


def scores(scorer: Scorer, batch: TrainBatch) -> np.ndarray:
    return asyncio.run(scorer.log_probs(batch.prompts, batch.responses)).values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_trainer_scores_as_an_engine_that_was_sent_its_weights(
    mesh: DeviceMesh, dtype: str, layout: Layout
) -> None:
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


QWEN = ModelConfig("qwen0.5b", 896, 24, 14, 2, 64, 4864, 151936, True, 4096, dtype="bfloat16")
GRID = Grid(
    decode=((1, 128), (16, 128), (128, 128), (16, 1024)),
    prefill=((1, 128), (8, 512), (2, 2048)),
    log_prob=((1, 128), (8, 512), (2, 2048)),
    train=((1, 128), (4, 512), (1, 2048)),
    copies=(1 << 22, 1 << 26),
)
BASE = CostConfig(
    **dict.fromkeys(("decode_step_s", "network_bytes_per_s", "host_bytes_per_s"), 1.0),
    **dict.fromkeys(("decode_step_s_per_sample", "prefill_s_per_token", "log_prob_s_per_token"), 0.0),
    **dict.fromkeys(("train_s_per_token", "train_step_s", "weight_bytes", "call_s", "sync_s"), 0.0),
    **dict.fromkeys(("offload_s", "reload_s"), 0.0),
    name="base",
    prompt_tokens=1,
    lengths=LengthsConfig(kind="constant", mean=1.0, cap=1),
)


def test_every_phase_is_timed_and_fitted() -> None:
    device = torch.device("cuda")
    for depths in ((24,), (2, 4)):
        watch = Stopwatch(device, repeats=5)
        found = record(QWEN, TrainingConfig(), device=device, watch=watch, grid=GRID, depths=(depths, depths))
        cost = fit_profile(found, BASE, "gpu").cost

        assert {row.phase for row in found.rows} == set(PHASES)
        assert all(row.layers == 24 for row in found.of("decode", "prefill", "log_prob", "train", "load"))
        assert cost.decode_step_s + cost.decode_weights_s > 0 and cost.train_step_s > 0
        assert cost.log_prob_call_s + cost.log_prob_s_per_token > 0 and cost.train_call_s + cost.train_s_per_token > 0
