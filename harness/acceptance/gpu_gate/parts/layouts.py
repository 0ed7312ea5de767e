"""Training in two stages, with shared layers, and with experts that are spread, on two devices, held against one device
that trains the same: what a wrong order of messages or a sum left out would change. Untied float32 models.

NCCL between GPUs, a device each; a machine of one is left out. Between cores Gloo, two processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from engines.gloo_groups import listening_store
from engines.torch.training import TorchWorld
from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts.common import SMALL, exact_products, random_rows
from harness.acceptance.gpu_gate.parts.worlds import in_processes
from harness.acceptance.gpu_gate.results import Check
from harness.calibration.profile.timing import wait_for
from harness.config import AlgorithmConfig, ModelConfig, TrainingConfig
from harness.protocols import TrainBatch, TrainingSetting
from harness.transfer_queue import Ragged

_TIMEOUT_S = 60.0
_DENSE = replace(SMALL, vocabulary=1024, tied_embeddings=False)
_EXPERTS = replace(_DENSE, architecture="qwen3_moe", experts=8, active_experts=2, ff=128)
_CASES = (
    ("two stages", _DENSE, TrainingConfig(pipeline_parallel=2)),
    ("shared layers", _DENSE, TrainingConfig(tensor_parallel=2)),
    ("spread experts", _EXPERTS, TrainingConfig(expert_parallel=2)),
)
_TOLERANCE = 1e-5  # of the norm of gradients, and in log-probabilities, whose sums are made in another order


@dataclass(frozen=True)
class _Found:
    """Results of one rank. log_probs: float32 [tokens], after all steps; norm: of first gradients; step_s: the last;
    alone: of the first rank, what it finds by itself."""

    log_probs: np.ndarray
    norm: float
    step_s: float
    alone: _Found | None = None


def run(setting: GateSetting) -> Iterator[Check]:
    """A check of each layout."""
    for what, model, training in _CASES:
        if setting.gpu and torch.cuda.device_count() < 2:
            yield Check(what, "there is one device", left_out=True)
            continue
        store = listening_store("127.0.0.1", 2, _TIMEOUT_S)
        arguments = [(rank, store.port, setting.kind, model, training) for rank in range(2)]
        both: list[_Found] = in_processes(_rank, arguments, 3 * _TIMEOUT_S)
        alone = both[0].alone
        assert alone is not None, "the first rank's"
        off = max(float(np.abs(found.log_probs - alone.log_probs).max()) for found in both)
        norm = max(abs(found.norm / alone.norm - 1) for found in both)
        said = (
            f"log-probs off by {off:.1e}, norm by {norm:.1e}, {both[0].step_s / alone.step_s:.2f} of one device's step"
        )
        yield Check(what, said, max(off, norm) < _TOLERANCE)


def _rank(rank: int, port: int, kind: str, model: ModelConfig, training: TrainingConfig) -> _Found:
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    exact_products()
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, 2, False)
    found = _trained(store, rank, 2, device, model, training)
    if rank == 0:
        found = replace(found, alone=_trained(dist.HashStore(), 0, 1, device, model, TrainingConfig()))
    return found


def _trained(
    store: dist.Store, rank: int, size: int, device: torch.device, model: ModelConfig, training: TrainingConfig
) -> _Found:
    algorithm = AlgorithmConfig("gate", 4, 4, 1, learning_rate=1e-4, correction="none")
    how = replace(training, layout="packed", tokens_per_micro_batch=512)
    world = TorchWorld(TrainingSetting(model, algorithm, how, store, rank, size, device, _TIMEOUT_S))
    samples = range(16)
    batch, norms = _batch(samples if training.expert_parallel == 1 else samples[rank::size]), []
    for _ in range(3):
        wait_for(device)
        start = time.perf_counter()
        asyncio.run(world.policy.accumulate(batch))
        norms.append(asyncio.run(world.policy.step())["grad_norm"])
        wait_for(device)
        step_s = time.perf_counter() - start
    every = _batch(samples)
    scored = asyncio.run(world.scorer().log_probs(every.prompts, every.responses))
    dist.destroy_process_group()
    return _Found(scored.values, norms[0], step_s)


def _batch(samples: range) -> TrainBatch:
    """The samples with these numbers, of different lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(64, 192, 16)
    prompts, responses = random_rows(_DENSE.vocabulary, lengths // 4), random_rows(_DENSE.vocabulary, lengths, seed=1)
    advantages, chosen = rng.standard_normal(16).astype(np.float32), np.array(samples)
    prompts, responses = prompts.take(chosen), responses.take(chosen)
    tokens = len(responses.values)
    behaviour = Ragged(np.full(tokens, -6.9, np.float32), responses.lengths)
    return TrainBatch(
        prompts, responses, behaviour, Ragged(np.zeros(tokens, np.int32), responses.lengths), advantages[chosen]
    )
